"""GEDI against its equations in plain loops, and the card's values."""

import dataclasses
import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.gedi import energy, langevin, prior_cross_entropy
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

VIEW_1 = torch.tensor([[2, 0, -1], [0, 1, 0]], dtype=torch.float64)
VIEW_2 = torch.tensor([[1, 0.5, -1], [-0.5, 2, 0]], dtype=torch.float64)
GENERATIVE = {"hidden_dim": 8, "num_clusters": 5, "generative_weight": 1.0, "num_chains": 9, "num_views": 3}


def softmax(row):
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def prior_oracle(view):
    rows = [softmax(row) for row in view.tolist()]
    clusters = len(rows[0])
    return -sum(math.log(sum(row[c] for row in rows) / len(rows)) for c in range(clusters)) / clusters


def invariance_oracle(view, other):
    total = 0.0
    for f, g in zip(view.tolist(), other.tolist(), strict=True):
        total -= sum(q * math.log(p) for p, q in zip(softmax(f), softmax(g), strict=True))
    return total / len(view)


def output_of(view, other, **arguments):
    method = bare_method("gedi", temperature=1.0, **arguments)
    return method.loss((view, other), empty_batch(len(view)))


def test_hand_computed_values():
    output = output_of(VIEW_1, VIEW_2)
    assert output.terms["invariance"].item() == pytest.approx(0.9146916536, abs=1e-9)
    assert output.terms["prior"].item() == pytest.approx(1.2554753622, abs=1e-9)
    assert output.total.item() == pytest.approx((3 * 1.2554753622 + 0.1 * 0.9146916536) / 2, abs=1e-9)
    torch.testing.assert_close(
        energy(VIEW_1), torch.tensor([-2.1698460196, -1.5514447139], dtype=torch.float64), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(("num", "clusters"), [(1, 2), (7, 4)])
def test_loss_equals_the_loop_oracle(num, clusters):
    view, other = randn(num, clusters), randn(num, clusters, seed=1)
    output = output_of(view, other, invariance_weight=3.0)
    expected = (clusters * prior_oracle(view) + 3 * invariance_oracle(view, other)) / 2
    torch.testing.assert_close(output.total.item(), expected, **EXACT)
    output.total.backward()
    assert other.grad.abs().max() > 0  # both views learn


def test_temperature_divides_the_logits():
    view, other = randn(5, 3), randn(5, 3, seed=1)
    warm = bare_method("gedi", temperature=0.5).loss((view, other), empty_batch(5)).total
    assert warm.item() == pytest.approx(output_of(2 * view, 2 * other).total.item(), abs=1e-12)


def test_collapsed_uniform_and_ideal_assignments():
    one = torch.full((6, 3), -200.0, dtype=torch.float64)
    one[:, 0] = 200.0
    collapsed = output_of(one, one)
    assert collapsed.terms["invariance"].item() == pytest.approx(0, abs=1e-12)
    assert collapsed.terms["prior"].item() == pytest.approx(400 * 2 / 3, abs=1e-9)
    assert torch.isfinite(output_of(one.float() * 1e4, one.float() * 1e4).total)
    uniform = output_of(torch.zeros_like(one), torch.zeros_like(one))
    assert uniform.terms["invariance"].item() == pytest.approx(math.log(3), abs=1e-12)
    assert uniform.terms["prior"].item() == pytest.approx(math.log(3), abs=1e-12)
    ideal = 400 * torch.eye(3, dtype=torch.float64).repeat(2, 1)
    best = output_of(ideal, ideal)
    assert best.terms["invariance"].item() == pytest.approx(0, abs=1e-12)
    assert best.terms["prior"].item() == pytest.approx(math.log(3), abs=1e-12)


def test_a_shift_of_all_logits_changes_the_energy_alone():
    view, other = randn(4, 3).detach(), randn(4, 3, seed=1).detach()
    torch.testing.assert_close(output_of(view + 7, other + 7).total, output_of(view, other).total, **EXACT)
    torch.testing.assert_close(energy(view + 7), energy(view) - 7, **EXACT)


def test_prior_is_at_least_the_logarithm_of_the_number_of_clusters():
    for seed in range(5):
        assert prior_cross_entropy(3 * randn(8, 4, seed=seed)) >= math.log(4)


def test_langevin_steps_and_stationary_distribution():
    keys = torch.arange(2000)
    start = torch.full((2000, 3), 2.0, dtype=torch.float64)

    def quadratic(x):
        return x.square().sum(1) / 2

    still = langevin(quadratic, start, keys, steps=2, step_size=0.25, noise=0.0)
    torch.testing.assert_close(still, start * 0.75**2, **EXACT)
    # x <- (1 - a / 2) x + sqrt(a) n has variance a / (1 - (1 - a / 2)^2) = 1 / (1 - a / 4) in the limit
    a = 0.1
    x = langevin(quadratic, start, keys, steps=200, step_size=a / 2, noise=math.sqrt(a))
    # 6000 numbers: standard deviations 1 / sqrt(6000) of the mean and sqrt(2 / 6000) of the variance, five of each
    assert abs(x.mean().item()) < 5 * 6000**-0.5
    assert abs(x.var().item() - 1 / (1 - a / 4)) < 5 * (2 / 6000) ** 0.5


def test_method_is_the_formula_of_its_networks():
    method, batch = tiny_method("gedi", hidden_dim=8, num_clusters=5), tiny_batch(6)
    output = method.loss(batch.views, batch)
    logits = [method.projector(method.backbone(view)) / 0.1 for view in batch.views]
    expected = (5 * prior_oracle(logits[0]) + 0.1 * invariance_oracle(*logits)) / 2
    torch.testing.assert_close(output.total.item(), expected, **EXACT)
    assert not [key for key in method.state_dict() if key.startswith(("chains", "visits"))]


def test_generative_term_compares_image_and_negatives():
    method, batch = tiny_method("gedi", **GENERATIVE), tiny_batch(4, num_views=3)
    output = method.loss(batch.views, batch)
    assert method.backbone.training
    (negatives,) = method._new_chains
    assert not negatives.requires_grad
    expected = output.terms["energy_gap"] + (5 * output.terms["prior"] + 0.1 * output.terms["invariance"]) / 2
    torch.testing.assert_close(output.total.detach(), expected, **EXACT)
    method.zero_grad()
    output.total.backward()
    assert all(p.grad is not None for _, p in method.trainable_parameters())


def test_chains_are_resumed_in_turn():
    method = tiny_method("gedi", **GENERATIVE)
    seen = []
    for step in range(4):
        batch = tiny_batch(4, num_views=3, seed=step)
        method.loss(batch.views, batch)
        seen.append(method._new_chains[0])
        method.after_optimizer_step(step + 1, 4)
    assert method.visits.item() == 16
    order = torch.cat(seen)
    # nine places: chains 9..15 overwrote 0..6, and 7 and 8 still stand
    assert torch.equal(method.chains, torch.cat([order[9:16], order[7:9]]))


def test_negatives_do_not_depend_on_the_images_of_the_batch():
    batch = tiny_batch(4, num_views=3)
    other = dataclasses.replace(batch, index=batch.index + 50)
    negatives = []
    for b in (batch, other):
        method = tiny_method("gedi", **GENERATIVE)
        method.eval()  # no step moves batch norm's statistics
        method.loss(b.views, b)
        negatives.append(method._new_chains[0])
    assert torch.equal(*negatives)


def test_generative_term_needs_the_image():
    with pytest.raises(ConfigError, match="simclr_and_image"):
        tiny_method("gedi", **GENERATIVE | {"num_views": 2})
