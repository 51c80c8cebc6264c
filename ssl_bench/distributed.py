"""Exact collectives with gradients, and the rule that makes losses exact at any world size.

Rule: the loss of a step is the MEAN OVER RANKS of what each rank returns; DistributedDataParallel
averages gradients in the same way. The backward functions below sum what every rank's loss sends to
a tensor, so the averaged gradient is exactly the gradient of that mean, whatever is communicated.

- A loss computed on gathered tensors is the same on every rank, so its mean is itself.
- A loss that is a mean over samples uses `batch_mean`, which stays exact when ranks hold
  different numbers of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_UNEVEN = False


def is_distributed() -> bool:
    """Whether a process group with more than one rank is running."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def is_rank_zero() -> bool:
    """Whether this process writes files and prints."""
    return rank() == 0


@contextlib.contextmanager
def uneven_batches() -> Iterator[None]:
    """Allow ranks to hold different numbers of samples (costs one size exchange a gather).

    Training never needs it, since the sampler deals equal shares; evaluation and tests do.
    """
    global _UNEVEN
    before, _UNEVEN = _UNEVEN, True
    try:
        yield
    finally:
        _UNEVEN = before


def batch_sizes(local: int, device: torch.device) -> list[int]:
    """Number of samples on each rank (equal shares are assumed outside `uneven_batches`)."""
    if not is_distributed():
        return [local]
    if not _UNEVEN:
        return [local] * world_size()
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=device)
    sizes[rank()] = local
    dist.all_reduce(sizes)
    return [int(n) for n in sizes.tolist()]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        x = x.contiguous()
        if len(set(sizes)) == 1:
            out = x.new_empty((sum(sizes), *x.shape[1:]))
            dist.all_gather_single(out, x)
            return out
        longest = max(sizes)
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        out = x.new_empty((longest * len(sizes), *x.shape[1:]))
        dist.all_gather_single(out, padded)
        return torch.cat([part[:n] for part, n in zip(out.split(longest), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        start = sum(ctx.sizes[: rank()])
        return grad[start : start + ctx.sizes[rank()]], None


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.contiguous().clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad


def gather_with_grad(x: Tensor) -> Tensor:
    """Concatenate the first axis over ranks in rank order: (B, ...) -> (N, ...), with gradient.

    The backward pass sums over ranks the gradient that reaches this rank's slice. The identity
    without a process group.
    """
    if not is_distributed():
        return x
    out: Tensor = _Gather.apply(x, batch_sizes(x.shape[0], x.device))
    return out


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """As `gather_with_grad`, for values that need no gradient (targets, labels, indices)."""
    return gather_with_grad(x.detach())


def all_reduce_sum_with_grad(x: Tensor) -> Tensor:
    """Sum over ranks, with gradient; the identity without a process group."""
    if not is_distributed():
        return x
    out: Tensor = _AllReduceSum.apply(x)
    return out


def all_reduce_mean_with_grad(x: Tensor) -> Tensor:
    """Mean over ranks, with gradient; the identity without a process group."""
    return all_reduce_sum_with_grad(x) / world_size()


def global_batch_size(local: int, device: torch.device) -> int:
    """Number of samples over all ranks."""
    return sum(batch_sizes(local, device))


def local_slice(local: int, device: torch.device) -> slice:
    """Where this rank's samples stand in a gathered tensor."""
    sizes = batch_sizes(local, device)
    start = sum(sizes[: rank()])
    return slice(start, start + local)


def global_mean(x: Tensor) -> Tensor:
    """Mean of the first axis over the global batch, (B, ...) -> (...), the same on every rank, with gradient."""
    if not is_distributed():
        return x.mean(0)
    return all_reduce_sum_with_grad(x.sum(0)) / global_batch_size(x.shape[0], x.device)


def batch_mean(values: Tensor) -> Tensor:
    """Share of this rank in the mean over the GLOBAL batch, a scalar: its mean over ranks is that mean.

    Args:
        values: One value a sample, shape (B,), or (B, ...) when every sample has equally many.
    """
    if not is_distributed():
        return values.mean()
    share = world_size() / global_batch_size(values.shape[0], values.device)
    return values.flatten(1).mean(1).sum() * share if values.dim() > 1 else values.sum() * share
