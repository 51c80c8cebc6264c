"""Mixed Barlow Twins against the README's formula in numpy, and the card's values."""

import numpy as np
import pytest
import torch

from ssl_bench.methods.mixed_barlow_twins import mixed_barlow_terms
from ssl_bench.random import uniform
from tests.reference.tiny import EXACT, randn, record_outputs, tiny_batch, tiny_method

A = torch.tensor([[1, 0], [2, 1], [3, 0], [4, 3]]).double()
B = torch.tensor([[1, 1], [2, 0], [4, 1], [3, 2]]).double()
M = torch.tensor([[1, 0.5], [2, 1], [3, 1], [3.5, 2]]).double()
PARTNER = torch.tensor([2, 0, 3, 1])


def oracle(z_a, z_b, z_m, share, partner, weight):
    a, b, m = (np.asarray(z.detach()) for z in (z_a, z_b, z_m))
    a, b, m = ((z - z.mean(0)) / z.std(0, ddof=1) for z in (a, b, m))
    num, partner = len(a), np.asarray(partner)
    c = a.T @ b / num
    off = (c**2).sum() - (np.diag(c) ** 2).sum()
    twins = ((1 - np.diag(c)) ** 2).sum() + weight * off
    g_a = (share * a.T @ a + (1 - share) * b[partner].T @ a) / num
    g_b = (share * a.T @ b + (1 - share) * b[partner].T @ b) / num
    mix = ((m.T @ a / num - g_a) ** 2).sum() + ((m.T @ b / num - g_b) ** 2).sum()
    return twins, mix


def terms(z_a, z_b, z_m, share, partner):
    return mixed_barlow_terms(z_a, z_b, z_m, torch.tensor(share).double(), partner, off_diagonal_weight=1 / 128)


def test_hand_computed_values():
    # the share 0.3 must be exact to double precision, which torch.tensor(0.3) is not
    share = torch.tensor(0.3, dtype=torch.float64)
    twins, mix = mixed_barlow_terms(A, B, M, share, PARTNER, off_diagonal_weight=0.0078125)
    assert twins.item() == pytest.approx(0.4833788931, abs=1e-9)
    assert mix.item() == pytest.approx(3.0043610414, abs=1e-9)
    assert (twins + 4 * 0.0078125 * mix).item() == pytest.approx(0.5772651756, abs=1e-9)


@pytest.mark.parametrize(("num", "width"), [(4, 2), (9, 5)])
def test_terms_equal_the_oracle(num, width):
    z = [randn(num, width, seed=seed) for seed in range(3)]
    partner = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    got = terms(*z, 0.25, partner)
    for value, wanted in zip(got, oracle(*z, 0.25, partner, 1 / 128), strict=True):
        torch.testing.assert_close(value.item(), float(wanted), **EXACT)


def test_an_unmixed_view_has_no_mixing_term():
    assert terms(A, B, A, 1.0, PARTNER)[1].item() == pytest.approx(0.0, abs=1e-20)


def test_gradient_flows_through_the_targets():
    z_a = A.clone().requires_grad_()
    terms(z_a, B, M, 0.25, PARTNER)[1].backward()
    assert z_a.grad.abs().max() > 1e-3


def test_method_mixes_images_by_one_share_and_a_permutation():
    method, batch = tiny_method("mixed_barlow_twins", projector_widths=(8, 4)), tiny_batch(6)
    seen = []
    method.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    outputs = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    draws = uniform(batch.keys("mix"), 2, "order")
    share, partner = draws[0, 0].double(), draws[:, 1].argsort()
    assert sorted(partner.tolist()) == list(range(6))
    mixed = share * batch.views[0] + (1 - share) * batch.views[1][partner]
    torch.testing.assert_close(seen[2], mixed, **EXACT)
    z = [o / o.norm(dim=1, keepdim=True) for o in outputs]
    twins, mix = oracle(*z, float(share), partner, 1 / 128)
    torch.testing.assert_close(total.item(), float(twins + 4 / 128 * mix), **EXACT)
