"""VICReg against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.losses.covariance import covariance_penalty, hinge_std
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

Z = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 5.0]], dtype=torch.float64)
Z_PRIME = torch.tensor([[1.0, 1.0], [2.0, 0.0], [2.0, 4.0]], dtype=torch.float64)


def covariance(rows, i, j):
    num = len(rows)
    mean_i, mean_j = sum(r[i] for r in rows) / num, sum(r[j] for r in rows) / num
    return sum((r[i] - mean_i) * (r[j] - mean_j) for r in rows) / (num - 1)


def terms(z, z_prime):
    """Invariance, variance averaged over views, covariance summed over views."""
    views = [z.tolist(), z_prime.tolist()]
    num, width = z.shape
    invariance = sum((a - b) ** 2 for x, y in zip(*views, strict=True) for a, b in zip(x, y, strict=True))
    variance = off_diagonal = 0.0
    for rows in views:
        for i in range(width):
            variance += max(0.0, 1 - math.sqrt(covariance(rows, i, i) + 1e-4)) / width
            for j in range(width):
                if i != j:
                    off_diagonal += covariance(rows, i, j) ** 2 / width
    return invariance / (num * width), variance / 2, off_diagonal


def oracle(z, z_prime, weights=(25.0, 25.0, 1.0)):
    return sum(w * t for w, t in zip(weights, terms(z, z_prime), strict=True))


def loss_of(z, z_prime, **arguments):
    return bare_method("vicreg", **arguments).loss((z, z_prime), empty_batch(len(z))).total


@pytest.mark.parametrize(("num", "width"), [(2, 2), (3, 7), (16, 5), (33, 16)])
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_loss_equals_the_loop_oracle(num, width, scale):
    z, z_prime = scale * randn(num, width), scale * randn(num, width, seed=1)
    torch.testing.assert_close(loss_of(z, z_prime).item(), oracle(z, z_prime), **EXACT)


def test_weights_reach_their_terms():
    z, z_prime = 0.5 * randn(6, 4), 0.5 * randn(6, 4, seed=1)
    got = loss_of(z, z_prime, invariance_weight=2.0, variance_weight=3.0, covariance_weight=5.0)
    torch.testing.assert_close(got.item(), oracle(z, z_prime, (2.0, 3.0, 5.0)), **EXACT)


def test_hand_computed_values():
    assert terms(Z, Z_PRIME) == pytest.approx((0.6666666667, 0.1056407837, 6.3611111111), abs=1e-9)
    assert loss_of(Z, Z_PRIME).item() == pytest.approx(25.6687973701, abs=1e-9)
    assert loss_of(Z, Z_PRIME, variance_weight=50.0).item() == pytest.approx(28.3098169623, abs=1e-9)
    assert loss_of(0.3 * Z, 0.3 * Z_PRIME).item() == pytest.approx(14.7263476262, abs=1e-9)


def test_terms_are_logged_by_name():
    output = bare_method("vicreg").loss((0.3 * Z, 0.3 * Z_PRIME), empty_batch(3))
    logged = {name: value.item() for name, value in output.terms.items()}
    expected = {"invariance": 0.06, "variance": 0.5269929050, "covariance": 0.0515250000}
    assert logged == pytest.approx(expected, abs=1e-9)


def test_constant_batch_is_a_dead_point_with_finite_gradient():
    z = torch.full((4, 3), 2.0, dtype=torch.float64, requires_grad=True)
    total = loss_of(z, z)
    assert total.item() == pytest.approx(24.75, abs=1e-9)
    total.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_agreeing_whitened_views_cost_nothing():
    z = torch.linalg.qr(torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    z = torch.linalg.qr(z - z.mean(0))[0] * math.sqrt(11)  # centered, orthogonal, unbiased variance 1
    assert loss_of(z, z).item() == pytest.approx(0.0, abs=1e-12)


def test_invariances():
    z, z_prime = 0.5 * randn(8, 4).detach(), 0.5 * randn(8, 4, seed=1).detach()
    reference = loss_of(z, z_prime)
    shift = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    samples, features = torch.tensor([3, 1, 7, 0, 2, 5, 4, 6]), torch.tensor([2, 0, 3, 1])
    for change in (
        lambda x: x + shift,
        lambda x: x[samples],
        lambda x: x[:, features],
        lambda x: x * signs,
    ):
        torch.testing.assert_close(loss_of(change(z), change(z_prime)), reference, **EXACT)
    torch.testing.assert_close(loss_of(z_prime, z), reference, **EXACT)
    rotation = torch.linalg.qr(randn(4, 4, seed=3).detach())[0]
    assert abs(loss_of(z @ rotation, z_prime @ rotation) - reference) > 1e-3
    for term in (hinge_std, covariance_penalty):
        torch.testing.assert_close(term(z + shift), term(z), **EXACT)
    assert abs(loss_of(z + shift, z_prime) - reference) > 1.0


def test_gradcheck():
    # away from the hinge's kink: every standard deviation is below 1
    assert torch.autograd.gradcheck(loss_of, (0.3 * randn(5, 3), 0.3 * randn(5, 3, seed=1)))


def test_covariance_penalty_is_exactly_zero_for_uncorrelated_features():
    z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]) * 1000
    assert covariance_penalty(z).item() == 0.0


def test_regularizers_stay_in_float32_under_autocast():
    z = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 30
    with torch.autocast("cpu", torch.bfloat16):
        inside = covariance_penalty(z)
    assert torch.equal(inside, covariance_penalty(z))
    wide = covariance_penalty(z.half())  # covariances beyond 255 would overflow when squared in float16
    assert wide.dtype == torch.float32
    assert torch.isfinite(wide)


def test_method_feeds_the_projections_of_both_views_to_the_loss():
    method, batch = tiny_method("vicreg", projector_widths=(16, 16, 8)), tiny_batch(6)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    torch.testing.assert_close(total.item(), oracle(*projections), **EXACT)


def test_expander_has_hidden_biases_and_a_plain_output():
    method = tiny_method("vicreg", projector_widths=(16, 12, 8))
    linears = [layer for layer in method.projector if isinstance(layer, nn.Linear)]
    assert [layer.weight.shape for layer in linears] == [(16, 64), (12, 16), (8, 12)]
    assert [layer.bias is not None for layer in linears] == [True, True, False]
    assert isinstance(method.projector[-1], nn.Linear)
