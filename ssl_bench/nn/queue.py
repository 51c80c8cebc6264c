"""A first-in first-out memory of embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.errors import ConfigError


class FeatureQueue(nn.Module):
    """The newest `size` rows given to `enqueue`; part of the state dict, never trained.

    Starts with unit-norm Gaussian rows, so that it is a valid set of negatives from the first step.
    Every rank enqueues the gathered rows of the global batch, so all ranks hold the same queue.

    Args:
        size: Number of rows K.
        dim: Width P of a row.
    """

    rows: Tensor
    num_enqueued: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("num_enqueued", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, rows: Tensor) -> None:
        """Replace the oldest rows by these, (N, P), in their order.

        Raises:
            ConfigError: If more rows come than the queue holds.
        """
        size = len(self.rows)
        if len(rows) > size:
            raise ConfigError(
                f"The queue must hold at least one global batch, got queue_size {size} and {len(rows)} rows a step. "
                "Raise the method's queue_size or lower recipe.global_batch_size."
            )
        places = (self.num_enqueued + torch.arange(len(rows), device=rows.device)) % size
        self.rows.index_copy_(0, places, rows.detach().to(self.rows.dtype))
        self.num_enqueued += len(rows)
