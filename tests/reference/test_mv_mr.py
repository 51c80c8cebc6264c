"""MV-MR against its equations in plain loops, the card's values, and its fixed descriptors written out."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ssl_bench.methods.mv_mr import centered_distances, distance_correlation
from ssl_bench.nn.descriptors import Scattering, local_std, oriented_gradients
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch

X = torch.tensor([[0], [1], [3], [7]], dtype=torch.float64)
Y = torch.tensor([[0, 0], [1, 1], [0, 2], [4, 0]], dtype=torch.float64)


def correlation_of(x, y, **kwargs):
    return distance_correlation(centered_distances(x, **kwargs), centered_distances(y, **kwargs)).item()


def centered(x, floor):
    n = len(x)
    d = [[math.sqrt(max(floor, sum((a - b) ** 2 for a, b in zip(r, s, strict=True)))) for s in x] for r in x]
    rows = [sum(r) / n for r in d]
    grand = sum(rows) / n
    return [[d[i][j] - rows[i] - rows[j] + grand for j in range(n)] for i in range(n)]


def correlation_oracle(x, y, floor=1e-4):
    a, b = (np.array(centered(z.tolist(), floor)) for z in (x, y))
    return math.sqrt((a * b).mean()) / ((a * a).mean() * (b * b).mean()) ** 0.25


def hinge(z):
    total = 0.0
    for column in zip(*z.tolist(), strict=True):
        mean = sum(column) / len(column)
        total += max(0.0, 1 - math.sqrt(sum((x - mean) ** 2 for x in column) / (len(column) - 1)))
    return total / z.shape[1]


def loss_of(view, other, image, **arguments):
    """The method on (N, 1, h, w) views whose projections are their pixels."""
    method = bare_method("mv_mr", projector_widths=(4, 4), **arguments).to(view.dtype)
    method.projector = nn.Flatten()
    return method.loss((view, other, image), empty_batch(len(view)))


def test_hand_computed_distance_correlation():
    assert correlation_of(X, Y, floor=0) == pytest.approx(0.9336360949, abs=1e-9)
    assert correlation_of(X, Y) == pytest.approx(0.9334030917, abs=1e-9)
    assert correlation_of(X, -3 * X + 5, floor=0) == pytest.approx(1.0, abs=1e-12)
    assert correlation_of(X, -3 * X + 5) == pytest.approx(0.9999998148, abs=1e-9)


@pytest.mark.parametrize(("num", "widths"), [(3, (2, 5)), (9, (4, 1))])
def test_distance_correlation_equals_the_loop_oracle(num, widths):
    x, y = randn(num, widths[0]).detach(), randn(num, widths[1], seed=1).detach()
    torch.testing.assert_close(correlation_of(x, y), correlation_oracle(x, y), **EXACT)


def test_distance_correlation_ignores_motions_and_scale_and_is_symmetric():
    x, y = randn(8, 3).detach(), randn(8, 5, seed=1).detach()
    turn = torch.linalg.qr(randn(3, 3, seed=2).detach()).Q
    plain = correlation_of(x, y, floor=0)
    assert correlation_of(2.5 * x @ turn + 7, y, floor=0) == pytest.approx(plain, abs=1e-9)
    assert correlation_of(y, x, floor=0) == pytest.approx(plain, abs=1e-12)


def test_gradient_of_the_correlation():
    x, y = randn(5, 3), randn(5, 2, seed=1)
    assert torch.autograd.gradcheck(
        lambda a, b: distance_correlation(centered_distances(a), centered_distances(b)), (x, y)
    )


@pytest.mark.parametrize("minimize", [False, True])
def test_loss_equals_the_loop_oracle(minimize):
    view, other, image = (randn(5, 1, 12, 12, seed=seed).detach() for seed in range(3))
    output = loss_of(view, other, image, minimize_descriptors=minimize)
    z, z_0 = view.flatten(1), image.flatten(1)
    descriptors = [image.flatten(1), other.flatten(1), Scattering().double()(image)]
    descriptors += [oriented_gradients(image), local_std(image)]
    dependence = [correlation_oracle(z, r) for r in descriptors]
    expected = ((z - z_0) ** 2).sum().item() / z.numel() + hinge(z) + hinge(z_0) + 1 - correlation_oracle(z, z_0)
    expected += sum(dependence) if minimize else sum(1 - value for value in dependence)
    # the hinge's eps of 1e-12 changes a standard deviation s by less than 1e-12 / (2 s), and s > 0.1 here
    torch.testing.assert_close(output.total.item(), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(output.terms["dependence"].item(), sum(dependence) / 5, **EXACT)


def test_hand_computed_hinge_and_a_batch_that_equals_its_views():
    y = Y[:, None, :, None]
    with_both = loss_of(y.repeat(1, 1, 8, 8), y.repeat(1, 1, 8, 8), y.repeat(1, 1, 8, 8))
    # each feature appears 64 times, so the mean of the hinge is that of Y; eps 1e-12 changes it by less than 1e-12
    assert with_both.terms["variance"].item() == pytest.approx(2 * 0.0212864461, abs=1e-9)
    assert with_both.terms["invariance"].item() == 0
    assert with_both.terms["agreement"].item() == pytest.approx(1.0, abs=1e-12)


def test_gradient_reaches_both_projections():
    images = [randn(5, 1, 12, 12, seed=seed) for seed in range(3)]
    loss_of(*images).total.backward()
    assert images[0].grad.abs().max() > 0
    assert images[2].grad.abs().max() > 0
    assert images[1].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-5, 1e-3])
def test_collapsed_projections_have_finite_loss_and_gradient(dtype, spread):
    image = randn(6, 1, 12, 12).to(dtype).detach()
    view = (0.3 + spread * randn(6, 1, 12, 12, seed=1)).to(dtype).detach().requires_grad_()
    for last in (image, torch.full_like(image, 0.3)):  # the second case: constant images, so constant descriptors
        view.grad = None
        output = loss_of(view, image, last)
        output.total.backward()
        assert torch.isfinite(output.total)
        assert torch.isfinite(view.grad).all()
        assert all(torch.isfinite(value) for value in output.terms.values())


def test_method_is_the_loss_of_its_projections():
    method = bare_method("mv_mr", heads=(), projector_widths=(8, 6))
    method.backbone = nn.Flatten()
    method.projector[0] = nn.Linear(256, 8, bias=False).double()
    batch = tiny_batch(7, num_views=3)
    z, z_0 = (method.projector(batch.views[v].flatten(1)).detach() for v in (0, 2))
    output = method.loss(batch.views, batch)
    torch.testing.assert_close(output.terms["agreement"].item(), correlation_oracle(z, z_0), **EXACT)
    torch.testing.assert_close(output.terms["variance"].item(), hinge(z) + hinge(z_0), rtol=1e-9, atol=1e-10)


# ---- descriptors --------------------------------------------------------------------------------


def morlet(scale, k):
    sigma, xi = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale
    radius = math.ceil(2.5 * 2 * sigma)
    angle = math.pi * k / 8
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1].astype(float)
    u, v = x * math.cos(angle) + y * math.sin(angle), -x * math.sin(angle) + y * math.cos(angle)
    envelope = np.exp(-(u**2 + v**2 / 4) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
    wave = envelope * np.exp(1j * xi * u)
    return wave - envelope * wave.sum() / envelope.sum()


def at(image, kernel, top, left):
    radius = len(kernel) // 2
    padded = np.pad(image, radius, mode="edge")
    return abs((padded[top : top + 2 * radius + 1, left : left + 2 * radius + 1] * kernel).sum())


def modulus(image, scale, k, stride):
    kernel, side = morlet(scale, k), len(image)
    return np.array([[at(image, kernel, i, j) for j in range(0, side, stride)] for i in range(0, side, stride)])


def average(image, sigma, stride):
    places = np.arange(len(image))
    out = []
    for i in range(0, len(image), stride):
        for j in range(0, len(image), stride):
            w = np.exp(-((places[:, None] - i) ** 2 + (places - j) ** 2) / (2 * sigma**2))
            out.append((w * image).sum() / w.sum())
    return np.array(out)


def test_scattering_equals_its_definition():
    images = randn(2, 1, 12, 12).detach()
    got = Scattering().double()(images)
    assert got.shape == (2, 81 * 9)
    maps = got.view(2, 81, 9)
    image = images[1, 0].numpy()
    # filters are kept in float32 (2^-24 relative, twice for order 2); sums of their moduli are below 4
    close = {"rtol": 0, "atol": 2 * 4 * 4 * 2.0**-24 * float(abs(image).max())}
    np.testing.assert_allclose(maps[1, 0], average(image, 1.6, 4), **close)
    for k in (0, 3):
        np.testing.assert_allclose(maps[1, 1 + k], average(modulus(image, 0, k, 1), 1.6, 4), **close)
        np.testing.assert_allclose(maps[1, 9 + k], average(modulus(image, 1, k, 2), 0.8, 2), **close)
        second = average(modulus(modulus(image, 0, k, 1), 1, 5, 2), 0.8, 2)
        np.testing.assert_allclose(maps[1, 17 + 8 * k + 5], second, **close)


def test_scattering_of_constants_and_of_many_channels():
    constant = Scattering().double()(torch.full((1, 1, 16, 16), 2.0, dtype=torch.float64)).view(81, 16)
    torch.testing.assert_close(constant[0], torch.full((16,), 2.0, dtype=torch.float64))
    assert constant[1:].abs().max() < 1e-6  # wavelets have mean 0 up to float32 rounding of their 17^2 values
    images = randn(3, 2, 9, 9).detach()
    each = [Scattering().double()(images[:, c : c + 1]) for c in range(2)]
    torch.testing.assert_close(Scattering().double()(images), torch.cat(each, dim=1))


def test_oriented_gradients_equal_the_loop():
    images = randn(1, 2, 17, 16).detach()
    got = oriented_gradients(images).view(2, 24, 2, 2)
    for c in range(2):
        padded = np.pad(images[0, c].numpy(), 1, mode="edge")
        expected = np.zeros((24, 2, 2))
        for i in range(16):
            for j in range(16):
                w = padded[i : i + 3, j : j + 3]
                gx = (w[:, 0] - w[:, 2]) @ [1, 2, 1]
                gy = (w[0] - w[2]) @ [1, 2, 1]
                place = (math.atan2(gy, gx) % math.pi) / math.pi * 24
                low = int(place)
                magnitude = math.hypot(gx, gy) / 64
                expected[low % 24, i // 8, j // 8] += magnitude * (1 - (place - low))
                expected[(low + 1) % 24, i // 8, j // 8] += magnitude * (place - low)
        np.testing.assert_allclose(got[c], expected, rtol=1e-9, atol=1e-11)


def test_local_std_equals_the_loop():
    images = randn(1, 1, 5, 6).detach()
    padded = np.pad(images[0, 0].numpy(), 1, mode="reflect")
    expected = [math.sqrt(padded[i : i + 3, j : j + 3].var() + 1e-8) for i in range(5) for j in range(6)]
    np.testing.assert_allclose(local_std(images)[0], expected, rtol=1e-9, atol=1e-11)
