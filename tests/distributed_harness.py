"""Run a function on several gloo processes, for tests of exactness over ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, world_size, *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(rank, world_size, *args)` on each of `world_size` processes; results in rank order.

    `function` must be importable (top level of a test module) and return tensors or plain containers.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_entry, args=(world_size, folder, function, args), nprocs=world_size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world_size)]
