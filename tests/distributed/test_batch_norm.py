"""GlobalBatchNorm over ranks against torch's BatchNorm on the concatenated batch."""

import pytest
import torch
from torch import nn

from ssl_bench.nn.batch_norm import convert_batch_norm
from tests.distributed_harness import run_on_ranks

SIZES = {2: ([3, 3], [5, 2]), 3: ([2, 2, 2], [3, 3, 2], [4, 3, 1])}
CASES = {
    "1d": (nn.BatchNorm1d, (4,), {}),
    "1d sequence": (nn.BatchNorm1d, (4, 3), {"momentum": 0.3}),
    "2d": (nn.BatchNorm2d, (4, 3, 2), {"eps": 1e-3}),
    "3d": (nn.BatchNorm3d, (4, 2, 3, 2), {}),
    "no affine": (nn.BatchNorm1d, (4,), {"affine": False}),
    "cumulative average": (nn.BatchNorm1d, (4,), {"momentum": None}),
    "no running statistics": (nn.BatchNorm1d, (4,), {"track_running_stats": False}),
}
# inputs up to 2^5 leave errors of 2^5 * 2^-53 * 8 = 3e-14 in centered values; gradients divide by cubes of
# standard deviations, of which the smallest (of three to eight samples) are near 0.1
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def build(case):
    cls, shape, settings = CASES[case]
    module = cls(4, **settings).double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(0.5, 2.0, 4) - i)
    return module, shape


def data(num, shape):
    generator = torch.Generator().manual_seed(0)
    # far from zero mean, unlike across channels
    offset = torch.arange(4.0, dtype=torch.float64).view(4, *[1] * (len(shape) - 1)) * 10
    return [torch.randn(num, *shape, generator=generator, dtype=torch.float64) + offset for _ in range(4)]


def steps(module, inputs, weights, rows, share):
    """Two training steps, then evaluation: outputs, input gradients, parameter gradients, buffers."""
    results = []
    for x, weight in zip(inputs, weights, strict=True):
        local = x[rows].clone().requires_grad_()
        module.zero_grad()
        out = module(local)
        (out * weight[rows]).square().sum().mul(share).backward()
        results += [out.detach(), local.grad / share]
    if module.track_running_stats:
        results.append(module.eval()(inputs[0][rows]).detach())
    return results


def on_rank(rank, world_size, sizes, case):
    module, shape = build(case)
    module = convert_batch_norm(module)
    first, second, *weights = data(sum(sizes), shape)
    start = sum(sizes[:rank])
    # a sum over all samples is the rank mean of world_size times the local sum
    results = steps(module, (first, second), weights, slice(start, start + sizes[rank]), float(world_size))
    gradients = [parameter.grad / world_size for parameter in module.parameters()]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    return results, gradients, list(module.buffers())


def all_cases(rank, world_size):
    return {f"{case} {sizes}": on_rank(rank, world_size, sizes, case) for case in CASES for sizes in SIZES[world_size]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_gradients_and_statistics_equal_torchs_on_the_whole_batch(world_size):
    ranks = run_on_ranks(world_size, all_cases)
    for case in CASES:
        for sizes in SIZES[world_size]:
            module, shape = build(case)
            first, second, *weights = data(sum(sizes), shape)
            results = steps(module, (first, second), weights, slice(None), 1.0)
            got = [rank[f"{case} {sizes}"] for rank in ranks]
            for i, value in enumerate(results):
                torch.testing.assert_close(torch.cat([rank[0][i] for rank in got]), value, **EXACT)
            for _, gradients, buffers in got:
                torch.testing.assert_close(gradients, [p.grad for p in module.parameters()], **EXACT)
                torch.testing.assert_close(buffers, list(module.buffers()), **EXACT)


def large_mean(rank, world_size):
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(rank)) * 0.1 + 1000
    return convert_batch_norm(nn.BatchNorm1d(1))(x).detach()


def test_variance_does_not_cancel_in_float32():
    out = torch.cat(run_on_ranks(2, large_mean))
    # E[x^2] - E[x]^2 at 1e6 has errors of 1e6 * 2^-24 = 0.06, six times the variance of 0.01
    assert out.std().item() == pytest.approx(1.0, abs=0.02)
    assert out.mean().item() == pytest.approx(0.0, abs=0.02)
