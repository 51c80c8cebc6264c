"""ER against its equations in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.entropy_reconstruction import log_normalizer, sphere_entropy
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

A = torch.tensor([[1, 0, 0], [0, 1, 0], [0.6, 0.8, 0]], dtype=torch.float64)
B = torch.tensor([[0.8, 0.6, 0], [0, 1, 0], [0.6, 0, 0.8]], dtype=torch.float64)
P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], dtype=torch.float64)
LOG_C = {  # closed forms of the Bessel function of half-integer order
    3: lambda k: math.log(4 * math.pi * math.sinh(k) / k),
    5: lambda k: (
        2.5 * math.log(2 * math.pi)
        - 1.5 * math.log(k)
        + math.log(math.sqrt(2 / (math.pi * k)) * (math.cosh(k) - math.sinh(k) / k))
    ),
}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(z):
    return [[x / math.sqrt(dot(row, row)) for x in row] for row in z.tolist()]


def entropy_oracle(z, kappa, estimator):
    """The definition with densities: -sum_i w_i ln p(z_i), p the mean of the kernels' densities."""
    log_c = LOG_C[len(z[0])](kappa)
    densities = [sum(math.exp(kappa * dot(a, b) - log_c) for b in z) / len(z) for a in z]
    weights = [1 / len(z)] * len(z) if estimator == "joe" else [p / sum(densities) for p in densities]
    return -sum(w * math.log(p) for w, p in zip(weights, densities, strict=True))


def reconstruction_oracle(z_a, z_b, kappa):
    return sum(LOG_C[len(z_a[0])](kappa) - kappa * dot(a, b) for a, b in zip(z_a, z_b, strict=True)) / len(z_a)


def oracle(z_a, z_b, kappa, estimator):
    z_a, z_b = unit(z_a), unit(z_b)
    entropy = (entropy_oracle(z_a, kappa, estimator) + entropy_oracle(z_b, kappa, estimator)) / 2
    return reconstruction_oracle(z_a, z_b, kappa) - entropy


def loss_of(z_a, z_b, **arguments):
    method = bare_method("entropy_reconstruction", projection_dim=z_a.shape[1], **arguments)
    return method.loss((z_a, z_b), empty_batch(len(z_a)))


@pytest.mark.parametrize(
    ("estimator", "of_a", "of_b"),
    [("plug_in", 0.5348598364, 0.6180827976), ("joe", 0.5378728810, 0.6181396890)],
)
def test_hand_computed_values_on_the_sphere(estimator, of_a, of_b):
    constant = log_normalizer(10.0, 3)
    assert constant == pytest.approx(9.5352919714, abs=1e-9)
    assert sphere_entropy(A, kappa=10, estimator=estimator).item() + constant == pytest.approx(of_a, abs=1e-9)
    assert sphere_entropy(B, kappa=10, estimator=estimator).item() + constant == pytest.approx(of_b, abs=1e-9)
    output = loss_of(A, B, estimator=estimator)
    assert output.terms["reconstruction"].item() == pytest.approx(2.3352919714, abs=1e-9)
    assert output.terms["entropy"].item() == pytest.approx((of_a + of_b) / 2, abs=1e-9)
    assert output.total.item() == pytest.approx(2.3352919714 - (of_a + of_b) / 2, abs=1e-9)


def test_hand_computed_values_on_the_discrete_support():
    output = loss_of(P.log(), Q.log(), support="discrete")
    entropy_p = -sum(m * math.log(m + 1e-7) for m in (0.4, 0.5, 0.1))
    assert output.terms["reconstruction"].item() == pytest.approx(0.8198107137, abs=1e-9)
    assert output.terms["entropy"].item() == pytest.approx((entropy_p + 0.9433480923) / 2, abs=1e-9)


@pytest.mark.parametrize(("num", "width"), [(2, 3), (7, 5)])
@pytest.mark.parametrize("estimator", ["plug_in", "joe"])
@pytest.mark.parametrize("kappa", [1.5, 10.0])
def test_loss_equals_the_loop_oracle(num, width, estimator, kappa):
    z_a, z_b = randn(num, width), randn(num, width, seed=1)
    got = loss_of(z_a, z_b, kappa=kappa, estimator=estimator).total.item()
    torch.testing.assert_close(got, oracle(z_a, z_b, kappa, estimator), **EXACT)


@pytest.mark.parametrize(("dim", "kappa"), [(3, 0.5), (3, 40.0), (5, 10.0)])
def test_log_normalizer_equals_the_closed_forms(dim, kappa):
    assert log_normalizer(kappa, dim) == pytest.approx(LOG_C[dim](kappa), rel=1e-12)


def test_log_normalizer_of_many_features_does_not_underflow():
    # the kernel is nearly flat: the log of the area of the sphere plus ln(1 + kappa^2 / 2d + ...) of the mean
    area = math.log(2) + 500 * math.log(math.pi) - math.lgamma(500)
    assert log_normalizer(10.0, 1000) - area == pytest.approx(100 / 2000, abs=100**2 / 1000**2)


@pytest.mark.parametrize("estimator", ["plug_in", "joe"])
def test_collapse_is_zero_and_agreeing_views_are_between_minus_log_n_and_zero(estimator):
    collapsed = torch.ones(5, 3, dtype=torch.float64)
    output = loss_of(collapsed, collapsed, estimator=estimator)
    torch.testing.assert_close(output.total.item(), 0.0, **EXACT)
    assert output.terms["entropy"].item() == pytest.approx(-0.4647080286, abs=1e-9)
    z = randn(6, 3)
    assert -math.log(6) < loss_of(z, z, estimator=estimator).total.item() < 0
    apart = torch.eye(3, dtype=torch.float64)
    spread = loss_of(apart, apart, estimator=estimator, kappa=200.0).total.item()  # the self term remains alone
    torch.testing.assert_close(spread, -math.log(3), **EXACT)


def test_joes_estimator_gives_info_nce_with_negatives_of_the_own_view():
    z_a, z_b = randn(6, 4), randn(6, 4, seed=1)
    u_a, u_b = unit(z_a), unit(z_b)
    expected = 0.0
    for i in range(6):
        for u in (u_a, u_b):
            total = math.log(sum(math.exp(10 * dot(u[i], other)) for other in u))
            expected += (total - 10 * dot(u_a[i], u_b[i])) / 12
    got = loss_of(z_a, z_b, estimator="joe").total.item()
    torch.testing.assert_close(got, expected - math.log(6), **EXACT)


def test_gradient_of_the_plug_in_estimator_flows_through_its_weights():
    z = randn(4, 3)
    z.data = torch.nn.functional.normalize(z.data)
    sphere_entropy(z, kappa=10, estimator="plug_in").backward()
    step = 1e-6
    for i, j in ((0, 0), (2, 1)):
        moved = [z.detach().clone() for _ in range(2)]
        moved[0][i, j] += step
        moved[1][i, j] -= step
        up, down = (sphere_entropy(m, kappa=10, estimator="plug_in").item() for m in moved)
        # central differences: the third derivative, below kappa^3, times step^2, and rounding 1e-15 / step
        assert z.grad[i, j].item() == pytest.approx((up - down) / (2 * step), abs=2e-9)


def test_rotation_scale_and_permutation_do_not_matter():
    z_a, z_b = randn(6, 3).detach(), randn(6, 3, seed=1).detach()
    rotation, order = torch.linalg.qr(randn(3, 3, seed=2).detach()).Q, torch.randperm(6)
    moved = loss_of((z_a @ rotation)[order] * 3, (z_b @ rotation)[order] / 7)
    torch.testing.assert_close(moved.total, loss_of(z_a, z_b).total, **EXACT)
    swapped = loss_of(z_a[:, [2, 0, 1]], z_b[:, [2, 0, 1]], support="discrete")
    torch.testing.assert_close(swapped.total, loss_of(z_a, z_b, support="discrete").total, **EXACT)


def test_one_hot_distributions_stay_finite():
    certain, opposite = torch.tensor([[900.0, 0.0]] * 2), torch.tensor([[0.0, 900.0]] * 2)
    same = loss_of(certain.double(), certain.double(), support="discrete")
    assert same.terms["entropy"].item() == pytest.approx(-math.log(1 + 1e-7), abs=1e-15)
    apart = loss_of(certain.double(), opposite.double(), support="discrete")
    assert apart.terms["reconstruction"].item() == pytest.approx(-math.log(1e-7), abs=1e-12)  # at most 16.118


def test_method_is_the_formula_of_its_projections():
    method, batch = tiny_method("entropy_reconstruction", hidden_dim=8, projection_dim=3), tiny_batch(6)
    z_a, z_b = (method.projector(method.backbone(view)) for view in batch.views)
    total = method.loss(batch.views, batch).total.item()
    torch.testing.assert_close(total, oracle(z_a, z_b, 10.0, "plug_in"), **EXACT)


@pytest.mark.parametrize("arguments", [{"support": "plane"}, {"estimator": "mean"}, {"kappa": 0.0}])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match="EntropyReconstruction needs"):
        tiny_method("entropy_reconstruction", **arguments)
