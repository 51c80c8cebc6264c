"""E2MC against its two terms in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.losses.effective_entropy import effective_entropy, marginal_entropy
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

U = torch.tensor([[0.1, 0.2], [0.4, 0.3], [0.6, 0.9], [0.9, 0.5]], dtype=torch.float64)
Z = torch.tensor([[-1, 0.5], [0, 2], [1, -0.5], [2, 0]], dtype=torch.float64)


def sigmoid(rows):
    return [[1 / (1 + math.exp(-x)) for x in row] for row in rows.tolist()]


def normal(rows):
    """Standard normal distribution function of unit rows times the root of their width."""
    values = []
    for row in rows.tolist():
        scale = math.sqrt(len(row)) / math.sqrt(sum(x * x for x in row))
        values.append([(1 + math.erf(scale * x / math.sqrt(2))) / 2 for x in row])
    return values


def entropy_of(u):
    num, width = len(u), len(u[0])
    m = round(math.sqrt(num))
    total = 0.0
    for j in range(width):
        column = sorted(row[j] for row in u)
        logarithms = [math.log((num + 1) / m * (column[i + m] - column[i]) + 1e-7) for i in range(num - m)]
        total += sum(logarithms) / (num - m)
    return total / width


def covariance_of(u):
    num, width = len(u), len(u[0])
    means = [sum(row[j] for row in u) / num for j in range(width)]
    total = 0.0
    for i in range(width):
        for j in range(width):
            if i != j:
                total += (sum((row[i] - means[i]) * (row[j] - means[j]) for row in u) / (num - 1)) ** 2
    return total / width


def vicreg(z_a, z_b):
    value = 25 * float(((z_a - z_b) ** 2).sum()) / z_a.numel()
    for z in (z_a, z_b):
        deviations = [math.sqrt(float(column.var()) + 1e-4) for column in z.T]
        value += 25 / 2 * sum(max(0.0, 1 - d) for d in deviations) / len(deviations) + covariance_of(z.tolist())
    return value


def oracle(z_a, z_b, entropy_weight, covariance_weight):
    mapped = [sigmoid(z) for z in (z_a, z_b)]
    added = sum(covariance_weight * covariance_of(u) - entropy_weight * entropy_of(u) for u in mapped)
    return vicreg(z_a, z_b) + added


def test_hand_computed_values():
    assert marginal_entropy(U).item() == pytest.approx(0.1410176246, abs=1e-9)
    assert marginal_entropy(U[:, :1]).item() == pytest.approx(0.2231436313, abs=1e-9)
    entropy, covariance = effective_entropy(Z, map="sigmoid")
    assert entropy.item() == pytest.approx(-0.1111449645, abs=1e-9)
    assert covariance.item() == pytest.approx(0.0009577408, abs=1e-9)
    assert marginal_entropy(torch.special.ndtr(Z)).item() == pytest.approx(0.2110253981, abs=1e-9)
    grid = torch.arange(9, dtype=torch.float64)[:, None] / 8
    assert marginal_entropy(grid).item() == pytest.approx(0.2231436313, abs=1e-9)


@pytest.mark.parametrize(("num", "width"), [(2, 3), (9, 4), (30, 5)])
@pytest.mark.parametrize(("name", "function"), [("sigmoid", sigmoid), ("normal", normal)])
def test_terms_equal_the_loop_oracle(num, width, name, function):
    z = randn(num, width, seed=num).detach()
    entropy, covariance = effective_entropy(z, map=name)
    torch.testing.assert_close(entropy.item(), entropy_of(function(z)), **EXACT)
    torch.testing.assert_close(covariance.item(), covariance_of(function(z)), **EXACT)


def test_collapse_has_the_least_entropy_and_no_covariance():
    z = torch.full((6, 3), 0.3, dtype=torch.float64).requires_grad_()
    entropy, covariance = effective_entropy(z, map="sigmoid")
    (covariance - entropy).backward()
    assert entropy.item() == pytest.approx(-16.1180956510, abs=1e-9)
    assert covariance.item() == pytest.approx(0, abs=1e-30)
    assert torch.isfinite(z.grad).all()


def test_order_of_samples_and_features_does_not_matter_but_a_rotation_does():
    z = torch.exp(randn(20, 4).detach())  # skewed, so that mixtures have other marginals
    order, columns = torch.randperm(20, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0, 3, 1])
    rotation = torch.linalg.qr(randn(4, 4, seed=1).detach()).Q
    expected = effective_entropy(z, map="sigmoid")
    torch.testing.assert_close(effective_entropy(z[order][:, columns], map="sigmoid"), expected, **EXACT)
    assert abs(effective_entropy(z @ rotation, map="sigmoid")[0] - expected[0]) > 1e-2


def test_spreading_the_outermost_pair_raises_the_entropy():
    values = [marginal_entropy(torch.cat([U[:, :1], torch.tensor([[-s], [1 + s]])])).item() for s in (0, 0.2, 0.5)]
    assert values == sorted(set(values))


def test_the_entropy_is_ascended():
    z = randn(32, 3, seed=5)
    gradient = torch.autograd.grad(effective_entropy(z, map="sigmoid")[0], z)[0]
    moved = effective_entropy(z.detach() + 1e-3 * gradient, map="sigmoid")[0]
    assert moved > effective_entropy(z, map="sigmoid")[0]


@pytest.mark.parametrize(("num", "width"), [(4, 2), (12, 5)])
def test_loss_equals_the_loop_oracle(num, width):
    z_a, z_b = randn(num, width).detach(), randn(num, width, seed=1).detach()
    method = bare_method("e2mc", projector_widths=(4, width), entropy_weight=0.7, mapped_covariance_weight=11.0)
    output = method.loss((z_a, z_b), empty_batch(num))
    torch.testing.assert_close(output.total.item(), oracle(z_a, z_b, 0.7, 11.0), **EXACT)


def test_method_feeds_the_projections_to_the_loss():
    method, batch = tiny_method("e2mc", projector_widths=(8, 6)), tiny_batch(7)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    torch.testing.assert_close(total.item(), oracle(*projections, 1.0, 25.0), **EXACT)
