"""I-Con against its divergence in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.icon import neighborhood_kl
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

# the card's four points (1, 0), (.8, .6), (0, 1), (-.6, .8) with the pairs (0, 1) and (2, 3), as two views
VIEW_1 = torch.tensor([[1, 0], [0, 1]], dtype=torch.float64)
VIEW_2 = torch.tensor([[0.8, 0.6], [-0.6, 0.8]], dtype=torch.float64)
CLUSTERS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]], dtype=torch.float64)
PARTNER = [1, 0, 3, 2]


def rows_of(z_1, z_2, temperature, share):
    """Target and learned distribution of every view over all views, one entry at a time."""
    z = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in (*z_1.tolist(), *z_2.tolist())]
    num = len(z)
    p = [[0.0] * num for _ in range(num)]
    q = [[0.0] * num for _ in range(num)]
    for i in range(num):
        weights = [
            0.0 if j == i else math.exp(sum(a * b for a, b in zip(z[i], z[j], strict=True)) / temperature)
            for j in range(num)
        ]
        for j in range(num):
            if j != i:
                q[i][j] = weights[j] / sum(weights)
                p[i][j] = share / (num - 1) + (1 - share if j == (i + num // 2) % num else 0)
    return p, q


def cross_entropy(p, q):
    terms = (a * math.log(b) for row, other in zip(p, q, strict=True) for a, b in zip(row, other, strict=True) if a)
    return -sum(terms) / len(p)


def oracle(z_1, z_2, temperature, share):
    p, q = rows_of(z_1, z_2, temperature, share)
    return cross_entropy(p, q) - cross_entropy(p, p)


def output_of(z_1, z_2, temperature, share):
    method = bare_method("icon", temperature=temperature, debiasing=share)
    return method.loss((z_1, z_2), empty_batch(len(z_1)))


@pytest.mark.parametrize(
    ("share", "entropy", "divergence"),
    [(0.0, 0.4301902771, 0.4301902771), (0.2, 0.6435236105, 0.1584295192), (0.6, 1.0701902771, 0.1199197379)],
)
def test_hand_computed_values(share, entropy, divergence):
    assert output_of(VIEW_1, VIEW_2, 0.5, share).total.item() == pytest.approx(divergence, abs=1e-9)
    assert cross_entropy(*rows_of(VIEW_1, VIEW_2, 0.5, share)) == pytest.approx(entropy, abs=1e-9)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0509546291), (0.6, 1.3370241382)])
def test_the_divergence_takes_any_distributions(share, expected):
    """The card's cluster kernel with both sides mixed: q_ij = sum_c a_ic a_jc / sum_k a_kc, self included."""
    learned = (1 - share) * CLUSTERS @ (CLUSTERS / CLUSTERS.sum(0)).T + share / 4
    torch.testing.assert_close(learned.sum(1), torch.ones(4, dtype=torch.float64), **EXACT)
    target = (1 - share) * torch.eye(4, dtype=torch.float64)[PARTNER] + share / 4
    entropy = -torch.xlogy(target, target).sum(1).mean().item()
    assert neighborhood_kl(target, learned.log()).mean().item() + entropy == pytest.approx(expected, abs=1e-9)


def test_divergence_is_zero_at_equality_only_and_never_negative():
    p, q = (randn(5, 7, seed=seed).detach().softmax(1) for seed in (0, 1))
    torch.testing.assert_close(neighborhood_kl(p, p.log()), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (neighborhood_kl(p, q.log()) > 1e-3).all()


def test_gradient_for_the_logits_is_learned_minus_target():
    target, logits = randn(4, 6).detach().softmax(1), randn(4, 6, seed=1)
    neighborhood_kl(target, logits.log_softmax(1)).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(1) - target, **EXACT)


@pytest.mark.parametrize(("num", "width"), [(2, 2), (5, 3), (9, 6)])
@pytest.mark.parametrize(("temperature", "share"), [(0.5, 0.6), (0.1, 0.0), (2.0, 0.9)])
def test_loss_equals_the_loop_oracle(num, width, temperature, share):
    z_1, z_2 = randn(num, width), randn(num, width, seed=1)
    output = output_of(z_1, z_2, temperature, share)
    torch.testing.assert_close(output.total.item(), oracle(z_1, z_2, temperature, share), **EXACT)
    _, q = rows_of(z_1, z_2, temperature, share)
    expected = sum(q[i][(i + num) % (2 * num)] for i in range(2 * num)) / (2 * num)
    torch.testing.assert_close(output.terms["positive_probability"].item(), expected, **EXACT)


def test_without_debiasing_it_is_simclr():
    method, batch = tiny_method("icon", temperature=0.3, debiasing=0.0), tiny_batch(6)
    base = tiny_method("simclr", temperature=0.3)
    base.load_state_dict(method.state_dict())
    torch.testing.assert_close(method.loss(batch.views, batch).total, base.loss(batch.views, batch).total, **EXACT)


def test_collapse_is_the_divergence_from_uniform():
    z = torch.ones(4, 3, dtype=torch.float64).requires_grad_()
    total = output_of(z, z, 0.2, 0.6).total
    total.backward()
    positive, other = 0.4 + 0.6 / 7, 0.6 / 7
    expected = positive * math.log(7 * positive) + 6 * other * math.log(7 * other)
    assert total.item() == pytest.approx(expected, abs=1e-12)
    assert torch.isfinite(z.grad).all()


def test_method_feeds_the_projections_to_the_loss():
    method, batch = tiny_method("icon"), tiny_batch(7)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    torch.testing.assert_close(total.item(), oracle(*projections, 0.5, 0.6), **EXACT)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_debiasing_has_a_range(share):
    with pytest.raises(ConfigError, match="debiasing"):
        tiny_method("icon", debiasing=share)
