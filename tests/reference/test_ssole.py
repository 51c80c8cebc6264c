"""SSOLE against singular values from numpy, and the card's values."""

import math

import numpy as np
import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.ssole import high_rank_term, low_rank_terms, nuclear_norm
from ssl_bench.views import build_views
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

TWO = torch.tensor([[[1, 0, 0], [0.6, 0.8, 0]], [[0, 1, 0], [0, 0.8, 0.6]]], dtype=torch.float64)  # image, view
THREE = torch.cat([TWO, torch.tensor([[[0.8, 0, 0.6]], [[0.6, 0.8, 0]]], dtype=torch.float64)], 1)


def nuclear(matrix):
    return np.linalg.svd(np.asarray(matrix), compute_uv=False).sum()


def oracle(z, weight=0.6, g=0.5):
    z = z.detach().numpy()
    num, views, _ = z.shape
    low = sum((nuclear(rows - rows.mean(0)) / (views - 1)) ** 2 for rows in z) / num
    high = 0.0
    for v in range(views):
        r = nuclear(z[:, v])
        angle = math.asin(min(r / num, 1)) - math.asin(1 / math.sqrt(num))
        c1 = (num**2 / r**2 - 1) / (num - 1)
        c2 = (num * math.cos(angle) ** 2 - 1) / (num - 1)
        high += (g * c1 + (1 - g) * c2) / views
    return low, high, low + weight * high


def loss_of(z):
    views = z.shape[1]
    method = bare_method("ssole", hidden_dim=4, projection_dim=z.shape[2], num_views=views)
    return method.loss(tuple(z.unbind(1)), empty_batch(len(z)))


@pytest.mark.parametrize(
    ("z", "low", "high", "total"),
    [(TWO, 0.3, 0.1927454730, 0.4156472838), (THREE, 0.2949413308, 0.2193932668, 0.4265772909)],
)
def test_hand_computed_values(z, low, high, total):
    output = loss_of(z)
    assert output.terms["low_rank"].item() == pytest.approx(low, abs=1e-9)
    assert output.terms["high_rank"].item() == pytest.approx(high, abs=1e-9)
    assert output.total.item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(("num", "views", "width"), [(4, 2, 6), (9, 4, 5), (3, 3, 8)])
def test_loss_equals_the_oracle(num, views, width):
    z = randn(num, views, width)
    z = z / z.norm(dim=-1, keepdim=True)
    output = loss_of(z)
    for got, wanted in zip((*output.terms.values(), output.total), oracle(z), strict=True):
        torch.testing.assert_close(got.item(), wanted, **EXACT)


def test_two_views_give_one_minus_the_cosine():
    torch.testing.assert_close(low_rank_terms(TWO), 1 - (TWO[:, 0] * TWO[:, 1]).sum(1), **EXACT)


def test_gradient_of_the_nuclear_norm_is_that_of_its_singular_vectors():
    x = randn(4, 6)
    nuclear_norm(x).backward()
    u, _, vh = torch.linalg.svd(x.detach(), full_matrices=False)
    # eigenvectors of the Gram matrix: errors grow with its condition number, here below 1e3
    torch.testing.assert_close(x.grad, u @ vh, rtol=0, atol=1e-10)


def test_mean_of_the_views_gets_no_gradient():
    z = TWO.clone().requires_grad_()
    low_rank_terms(z).sum().backward()
    # with the mean's gradient, shifting all views of an image alike would change nothing
    assert z.grad.sum(1).abs().max() < 1e-12  # the deviations cancel for two views, whatever the mean
    one = z.grad.clone()
    y = TWO.clone().requires_grad_()
    mean = TWO.mean(1, keepdim=True)
    nuclear_norm(y - mean).square().sum().backward()
    torch.testing.assert_close(one, y.grad, **EXACT)


def test_the_direction_in_which_deviations_vanish_gets_no_gradient():
    # nearly equal views in float32: the true gradient of an image's views, r U V^T of rank 2, sums to 0 over them
    z = torch.nn.functional.normalize(torch.ones(3, 5) + 0.01 * randn(3, 5).detach().float(), dim=1)[None]
    z.requires_grad_()
    low_rank_terms(z).sum().backward()
    assert z.grad.norm() > 1e-3
    # float32 entries of at most the norm are rounded to 2^-24 of it, three are summed
    assert z.grad.sum(1).abs().max() < 3 * 2**-24 * z.grad.norm()


def test_collapse_orthonormal_images_and_equal_views_have_finite_gradients():
    same = torch.zeros(4, 2, 5, dtype=torch.float64)
    same[..., 0] = 1
    basis = torch.eye(4, 5, dtype=torch.float64)[:, None].expand(4, 2, 5).clone()
    for z, low, high in [(same, 0.0, 1.0), (basis, 0.0, 0.0)]:
        z.requires_grad_()
        output = loss_of(z)
        output.total.backward()
        assert output.terms["low_rank"].item() == pytest.approx(low, abs=1e-9)
        assert output.terms["high_rank"].item() == pytest.approx(high, abs=1e-7)
        assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_at_an_exactly_orthonormal_batch_is_finite(dtype):
    z = torch.eye(8, 16, dtype=dtype, requires_grad=True)
    value = high_rank_term(z, mix=0.5)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()


def test_loss_ignores_rotation_and_the_order_of_images_and_views():
    z = randn(5, 3, 6).detach()
    z = z / z.norm(dim=-1, keepdim=True)
    rotation = torch.linalg.qr(randn(6, 6, seed=1).detach())[0]
    for moved in (z @ rotation, z.flip(0), z.flip(1)):
        torch.testing.assert_close(loss_of(moved).total, loss_of(z).total, **EXACT)


def test_one_view_is_refused():
    with pytest.raises(ConfigError, match="at least two views"):
        loss_of(TWO[:, :1])


def test_method_is_the_formula_of_its_projections():
    method = tiny_method("ssole", hidden_dim=8, projection_dim=9, num_views=3)
    batch = tiny_batch(5, num_views=3)
    z = torch.stack([method.projector(method.backbone(view)) for view in batch.views], 1)
    z = z / z.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), oracle(z)[2], **EXACT)


def test_views_are_those_of_the_official_configuration():
    facts = {"channels": 3, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    view = build_views("ssole", image_size=224, **facts).specs[0]
    assert (view.crop_scale, view.flip_probability, view.gray_probability) == ((0.14, 1.0), 0.5, 0.2)
    assert (view.jitter_probability, view.brightness, view.contrast, view.saturation, view.hue) == (0.8,) * 4 + (0.2,)
    assert (view.blur_probability, view.solarize_probability) == (0.5, 0.2)
    assert build_views("ssole", image_size=224, **facts).specs == (view,) * 4
    assert build_views("ssole", image_size=224, overrides={"num_views": 8}, **facts).num_views == 8
