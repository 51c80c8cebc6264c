"""Point 4: several processes on disjoint parts of a batch equal one process on the whole of it.

Every method runs two steps in float64, with `after_optimizer_step` and a small gradient step between
them, so that targets, queues and running statistics are compared too. The rank-mean loss, every
parameter's averaged gradient and every floating-point entry of the state dict must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ssl_bench.checking import points
from ssl_bench.data.dataset import Dataset
from ssl_bench.distributed import all_reduce_mean_with_grad, is_distributed, uneven_batches
from ssl_bench.methods import SSLMethod
from ssl_bench.nn.batch_norm import convert_batch_norm
from ssl_bench.records import Batch

NUM_STEPS = 2
STEP_SIZE = 1e-3  # of the gradient step between the two: moves every weight, keeps the loss regular
FLOOR = 1e-6  # entries below this share of the largest of their kind are rounding noise around a true zero
TIMEOUT = datetime.timedelta(seconds=120)


def compare_ranks(names: Sequence[str], world_sizes: Sequence[int] = (2, 3)) -> dict[str, float | str]:
    """Largest relative error of each method between several processes and one, or why it failed.

    Two ranks hold halves of the batch, three hold uneven shares (3 + 3 + 2 of 8). The processes are
    started once for all methods.

    Args:
        names: Registered, trainable methods.
        world_sizes: Numbers of ranks to try, each at least 2.
    """
    dataset = points.small_dataset()
    results: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                torch.save(run_steps(name, dataset), Path(folder, f"{name}.pt"))
            except Exception as error:
                results[name] = f"one process: {type(error).__name__}: {error}"
        good = [name for name in names if name not in results]
        if good:
            spawn(_rank, args=(tuple(world_sizes), good, folder), nprocs=max(world_sizes))
        for name in good:
            files = sorted(Path(folder).glob(f"{name}.*.json"))
            outcomes = [json.loads(file.read_text()) for file in files]
            failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
            results[name] = failures[0] if failures else max(outcomes)
    return {name: results[name] for name in names}


def run_steps(name: str, dataset: Dataset) -> list[dict[str, Tensor]]:
    """Two steps on this rank's share of the batch; each gives loss, averaged gradients and state.

    Without a process group this is the reference.
    """
    _, views = points.make_views(name, dataset)
    method = points.make_method(name, points.kinds_of(name)[0], dataset, views.num_views).double().train()
    num = max(8, method.min_global_batch)
    if is_distributed():
        convert_batch_norm(method)
    method.on_pretrain_start()
    record = []
    for step in range(NUM_STEPS):
        whole = points.make_batch(name, dataset, views, start=step * num, num=num)
        record.append(_step(method, _share(whole, num)))
        method.after_optimizer_step(step + 1, 2 * NUM_STEPS)
        record[-1] |= {f"state {key}": value.clone() for key, value in method.state_dict().items()}
    return record


def relative_error(ranks: list[dict[str, Tensor]], one: list[dict[str, Tensor]]) -> float:
    """Largest error of any loss, gradient or state tensor, relative to that tensor's largest magnitude."""
    worst = 0.0
    for got, want in zip(ranks, one, strict=True):
        assert got.keys() == want.keys(), "the same entries must exist at every world size"
        scales = {key: float(value.abs().max()) for key, value in want.items() if value.is_floating_point()}
        for kind in ("loss", "gradient", "state"):
            keys = [key for key in scales if key.split()[0] == kind]
            floor = FLOOR * max(scales[key] for key in keys)
            for key in keys:
                error = float((got[key] - want[key]).abs().max()) / max(scales[key], floor, 1e-300)
                worst = max(worst, error if error == error else float("inf"))
    return worst


def _step(method: SSLMethod, batch: Batch) -> dict[str, Tensor]:
    method.zero_grad(set_to_none=True)
    total = method.loss(batch.views, batch).total
    total.backward()
    record = {"loss": all_reduce_mean_with_grad(total.detach())}
    for name, parameter in method.trainable_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = all_reduce_mean_with_grad(gradient)
        record[f"gradient {name}"] = gradient
        with torch.no_grad():
            parameter.sub_(gradient, alpha=STEP_SIZE)
    return record


def _share(whole: Batch, num: int) -> Batch:
    if not is_distributed():
        own = slice(0, num)
    else:
        world, rank = dist.get_world_size(), dist.get_rank()
        ends = [-(-num * (r + 1) // world) for r in range(world)]  # rounded up: 3, 6, 8 for three ranks
        own = slice(ends[rank - 1] if rank else 0, ends[rank])
    assert isinstance(whole.images, Tensor)
    return dataclasses.replace(
        whole,
        images=whole.images[own],
        index=whole.index[own],
        views=tuple(view[own].double() for view in whole.views),
        labels=None if whole.labels is None else whole.labels[own],
    )


def _rank(rank: int, world_sizes: tuple[int, ...], names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dataset = points.small_dataset()
    for world_size in world_sizes:
        for name in names:
            if rank < world_size:
                # a group of its own, so that a method that breaks it cannot harm the next one
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/{name}.{world_size}",
                    rank=rank,
                    world_size=world_size,
                    timeout=TIMEOUT,
                )
                outcome = _compare(name, dataset, world_size, folder)
                dist.destroy_process_group()
                Path(folder, f"{name}.{world_size}.{rank}.json").write_text(json.dumps(outcome))


def _compare(name: str, dataset: Dataset, world_size: int, folder: str) -> Any:
    try:
        with uneven_batches() if world_size > 2 else contextlib.nullcontext():
            ranks = run_steps(name, dataset)
        return relative_error(ranks, torch.load(f"{folder}/{name}.pt", weights_only=True))
    except Exception as error:
        return f"{world_size} ranks: {type(error).__name__}: {error}"
