"""Collectives: values and gradients over ranks are those of one process on the whole batch."""

import contextlib

import pytest
import torch

from ssl_bench import distributed as D
from tests.distributed_harness import run_on_ranks

EVEN, UNEVEN = {2: [4, 4], 3: [3, 3, 3]}, {2: [5, 3], 3: [3, 3, 2]}
# float64 sums of a few dozen terms in another order
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def data(num):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num, 3, generator=generator, dtype=torch.float64) for _ in range(3))


def losses(x, weight, other):
    """One scalar a collective; each couples samples of different ranks nonlinearly."""
    everything = D.gather_with_grad(x)
    own = D.local_slice(len(x), x.device)
    rows = torch.arange(own.start, own.stop)
    similarity = (x @ everything.T).softmax(1)
    return {
        "gathered, the same on all ranks": (everything.T @ everything).square().sum(),
        "local anchors, global candidates": D.batch_mean(-similarity.gather(1, rows[:, None]).log()[:, 0]),
        "sample mean": D.batch_mean((x * weight).square()),
        "reduced sum": D.all_reduce_sum_with_grad((x * weight).sum(0)).square().sum(),
        "reduced mean": D.all_reduce_mean_with_grad((x * weight).sum(0)).square().sum() * D.world_size() ** 2,
        "global mean": D.global_mean(x * weight).square().sum(),
        "detached targets": D.batch_mean((x @ D.gather(other).T).square().sum(1)),
    }  # fmt: skip


def on_rank(rank, world_size, sizes, uneven):
    x, weight, other = data(sum(sizes))
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    with D.uneven_batches() if uneven else contextlib.nullcontext():
        assert D.global_batch_size(sizes[rank], torch.device("cpu")) == sum(sizes)
        assert D.local_slice(sizes[rank], torch.device("cpu")) == rows
        assert D.is_rank_zero() == (rank == 0)
        results = {}
        for name in losses(x[rows], weight[rows], other[rows]):
            local = x[rows].clone().requires_grad_()
            value = losses(local, weight[rows], other[rows])[name]
            value.backward()
            mean = value.detach().clone()
            torch.distributed.all_reduce(mean)
            # what averaging over ranks leaves of the gradient of this rank's own samples
            results[name] = (mean / world_size, local.grad / world_size)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("uneven", [False, True])
def test_value_and_gradient_equal_one_process(world_size, uneven):
    sizes = (UNEVEN if uneven else EVEN)[world_size]
    ranks = run_on_ranks(world_size, on_rank, sizes, uneven)
    x, weight, other = data(sum(sizes))
    for name in losses(x, weight, other):
        whole = x.clone().requires_grad_()
        value = losses(whole, weight, other)[name]
        value.backward()
        for result in ranks:
            torch.testing.assert_close(result[name][0], value.detach(), **EXACT)
        gradient = torch.cat([result[name][1] for result in ranks])
        torch.testing.assert_close(gradient, whole.grad, **EXACT)


def gather_other_types(rank, world_size):
    labels = D.gather(torch.tensor([rank, 10 + rank]))
    pixels = D.gather(torch.full((2, 1, 2), rank, dtype=torch.uint8))
    strided = D.gather(torch.arange(6.0).reshape(2, 3).T + rank)
    return labels, pixels, strided


def test_integers_bytes_and_strided_tensors_are_gathered_in_rank_order():
    for labels, pixels, strided in run_on_ranks(2, gather_other_types):
        assert labels.tolist() == [0, 10, 1, 11]
        assert pixels.flatten().tolist() == [0] * 4 + [1] * 4
        one = torch.arange(6.0).reshape(2, 3).T
        assert torch.equal(strided, torch.cat([one, one + 1]))


def test_without_a_process_group_everything_is_the_identity():
    x = torch.randn(4, 3, requires_grad=True)
    assert D.gather_with_grad(x) is x
    assert D.all_reduce_sum_with_grad(x) is x
    assert not D.gather(x).requires_grad
    assert torch.equal(D.all_reduce_mean_with_grad(x), x)
    assert torch.equal(D.batch_mean(x), x.mean())
    assert torch.equal(D.global_mean(x), x.mean(0))
    assert (D.world_size(), D.rank(), D.is_rank_zero(), D.is_distributed()) == (1, 0, True, False)
