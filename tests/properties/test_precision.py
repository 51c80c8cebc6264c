"""Losses are computed in at least float32, whatever the inputs' type and the autocast mode."""

import pytest
import torch

from ssl_bench.losses.common import full_precision, unit_rows


@full_precision
def product(a, *others, scale=None):
    out = a @ a.T
    for other in others:
        for part in other if isinstance(other, list | tuple) else [other]:
            out = out + part @ part.T
    return out if scale is None else out * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_arguments_are_widened_also_in_lists_and_keywords(dtype):
    a, b, c = (torch.randn(4, 64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(3))
    scale = torch.tensor(0.1, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = product(a, [b, c], scale=scale)
    expected = (sum(x.double() @ x.double().T for x in (a, b, c)) * scale.double()).float()
    assert got.dtype == torch.float32
    # float32 sums of 192 products up to 10 each
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_wider_types_stay():
    assert product(torch.randn(2, 3, dtype=torch.float64)).dtype == torch.float64
    assert product(torch.randn(2, 3)).dtype == torch.float32


def test_autocast_is_off_inside_and_on_again_after():
    a = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        # bfloat16 products would be off by 1e-2; float32 sums of 64 are not by more than 1e-5
        torch.testing.assert_close(product(a), (a.double() @ a.double().T).float(), rtol=1e-6, atol=2e-5)
        assert (a @ a.T).dtype == torch.bfloat16


def test_unit_rows_keep_zero_rows_and_their_gradient_finite():
    x = torch.zeros(2, 3, requires_grad=True)
    unit_rows(x).sum().backward()
    assert torch.equal(unit_rows(x), torch.zeros(2, 3))
    assert torch.isfinite(x.grad).all()
