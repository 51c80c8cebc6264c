"""SimCLR against the paper's equation 1 in plain loops, and the card's values."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ssl_bench.losses.contrastive import nt_xent
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

Z_1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
Z_2 = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=torch.float64)


def oracle(z_1, z_2, temperature, *, keep_self=False, drop_positive=False, multiply=False):
    """Mean over the 2N anchors, one exponential at a time; the flags are mutations that must be told apart."""
    z = [np.asarray(row, dtype=np.float64) for row in (*z_1, *z_2)]
    num = len(z) // 2
    total = 0.0
    for i in range(2 * num):
        positive = (i + num) % (2 * num)
        similarity = []
        for j in range(2 * num):
            cosine = float(z[i] @ z[j]) / math.sqrt(float(z[i] @ z[i]) * float(z[j] @ z[j]))
            similarity.append(cosine * temperature if multiply else cosine / temperature)
        denominator = 0.0
        for j in range(2 * num):
            if (j == i and not keep_self) or (j == positive and drop_positive):
                continue
            denominator += math.exp(similarity[j])
        total += math.log(denominator) - similarity[positive]
    return total / (2 * num)


def loss_of(z_1, z_2, temperature):
    method = bare_method("simclr", temperature=temperature)
    return method.loss((z_1, z_2), empty_batch(len(z_1))).total


@pytest.mark.parametrize(("num", "width"), [(2, 2), (3, 5), (8, 4), (17, 32)])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_loss_equals_the_loop_oracle(num, width, temperature):
    z_1, z_2 = randn(num, width, seed=num), randn(num, width, seed=num + 1)
    expected = oracle(z_1.detach().numpy(), z_2.detach().numpy(), temperature)
    torch.testing.assert_close(loss_of(z_1, z_2, temperature).item(), expected, **EXACT)


@pytest.mark.parametrize("mutation", ["keep_self", "drop_positive", "multiply"])
def test_mutations_of_the_equation_would_be_noticed(mutation):
    z_1, z_2 = randn(5, 4), randn(5, 4, seed=1)
    mutated = oracle(z_1.detach().numpy(), z_2.detach().numpy(), 0.5, **{mutation: True})
    assert abs(loss_of(z_1, z_2, 0.5).item() - mutated) > 1e-2


def test_method_feeds_the_projections_of_both_views_to_the_loss():
    method, batch = tiny_method("simclr", temperature=0.3), tiny_batch(7)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    z_1, z_2 = (z.numpy() for z in projections)
    torch.testing.assert_close(total.item(), oracle(z_1, z_2, 0.3), **EXACT)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 0.6680402017), (0.1, 1.0648499783)])
def test_hand_computed_values(temperature, expected):
    assert loss_of(Z_1, Z_2, temperature).item() == pytest.approx(expected, abs=1e-9)


def test_official_code_returns_the_sum_over_both_anchors():
    assert 2 * loss_of(Z_1, Z_2, 0.5).item() == pytest.approx(1.3360804034, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_collapse_costs_log_of_the_other_candidates(temperature):
    z = torch.ones(4, 3, dtype=torch.float64)
    assert loss_of(z, z, temperature).item() == pytest.approx(math.log(7), abs=1e-9)


def test_perfect_positives_of_orthonormal_images():
    z = torch.eye(3, dtype=torch.float64)
    expected = math.log(math.e**2 + 4) - 2
    assert expected == pytest.approx(0.4326529030, abs=1e-9)
    assert loss_of(z, z, 0.5).item() == pytest.approx(expected, abs=1e-9)


def test_invariances():
    z_1, z_2 = randn(6, 4).detach(), randn(6, 4, seed=1).detach()
    reference = loss_of(z_1, z_2, 0.2)
    scale = torch.rand(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.1
    rotation = torch.linalg.qr(randn(4, 4, seed=3).detach())[0]
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    for changed in ((z_1 * scale, z_2), (z_1 @ rotation, z_2 @ rotation), (z_2, z_1), (z_1[order], z_2[order])):
        torch.testing.assert_close(loss_of(*changed, 0.2), reference, **EXACT)
    assert abs(loss_of(z_1[order], z_2, 0.2) - reference) > 1e-2  # permuting one view breaks the pairs


def test_gradient_is_orthogonal_to_each_projection():
    z_1, z_2 = randn(6, 4), randn(6, 4, seed=1)
    loss_of(z_1, z_2, 0.2).backward()
    for z in (z_1, z_2):
        assert z.grad.abs().max() > 1e-3
        torch.testing.assert_close((z.grad * z).sum(1), torch.zeros(6, dtype=torch.float64), **EXACT)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda a, b: loss_of(a, b, 0.5), (randn(4, 3), randn(4, 3, seed=1)))


def test_shares_of_two_ranks_add_up_and_need_their_offset():
    z_1, z_2 = randn(6, 4), randn(6, 4, seed=1)
    whole = loss_of(z_1, z_2, 0.2)
    gradients = torch.autograd.grad(whole, (z_1, z_2))

    def shares(offset):
        parts = [
            nt_xent(z_1[s : s + 3], z_2[s : s + 3], z_1, z_2, temperature=0.2, offset=s if offset else 0)
            for s in (0, 3)
        ]
        return torch.cat(parts).mean()

    torch.testing.assert_close(shares(True), whole, rtol=1e-10, atol=0)
    for got, want in zip(torch.autograd.grad(shares(True), (z_1, z_2)), gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert abs(shares(False) - whole) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    z_1, z_2 = (torch.randn(8, 16, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        value = nt_xent(z_1, z_2, z_1, z_2, temperature=0.1).mean()
    assert value.dtype == torch.float32
    # float32 cosines are exact to 1e-7 and divided by 0.1: logits to 1e-6
    assert value.item() == pytest.approx(oracle(z_1.double().numpy(), z_2.double().numpy(), 0.1), abs=1e-5)


def test_projector_is_the_official_one():
    method = tiny_method("simclr", projection_dim=16)
    layers = list(method.projector)
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    norms = [layer for layer in layers if isinstance(layer, nn.BatchNorm1d)]
    assert [layer.weight.shape for layer in linears] == [(64, 64), (64, 64), (16, 64)]
    assert all(layer.bias is None for layer in linears)
    assert [norm.bias.requires_grad for norm in norms] == [True, True, False]
    assert isinstance(layers[-1], nn.BatchNorm1d)
    weights = torch.cat([layer.weight.flatten() for layer in linears])
    assert weights.std().item() == pytest.approx(0.01, rel=0.05)  # 9,216 draws: standard error 0.7 %
