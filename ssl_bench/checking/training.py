"""The points of `ssl-bench check` that train: resume, and learning beyond the untrained backbone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ssl_bench.checking.points import kinds_of, make_method, make_views
from ssl_bench.data import PretrainDataModule
from ssl_bench.data.dataset import Dataset
from ssl_bench.methods import SSLMethod
from ssl_bench.training import pretrain

RESUME_STEPS = 5


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: object, pl_module: SSLMethod, *args: object) -> None:
        if pl_module.trainer.global_step == self.step:
            raise _StoppedError


class _StoppedError(Exception):
    """Stands for a kill: nothing is saved after it."""


def final_state(name: str, dataset: Dataset, folder: Path, *, stop_after: int | None) -> dict[str, Tensor]:
    """Weights and buffers after `RESUME_STEPS` steps with a checkpoint every two.

    Args:
        name: Method.
        dataset: Images.
        folder: Where checkpoints go.
        stop_after: Break off before this step and start again from the last checkpoint; None runs through.
    """
    recipe, views = make_views(name, dataset)
    recipe = dataclasses.replace(recipe, warmup_epochs=0.0)

    def run(callbacks: list[Callback]) -> dict[str, Tensor]:
        method = make_method(name, kinds_of(name)[0], dataset, views.num_views)
        data = PretrainDataModule(
            dataset, views, global_batch_size=recipe.global_batch_size, seed=0, with_labels=method.uses_labels
        )
        pretrain(
            method,
            data,
            folder=folder,
            recipe=recipe,
            epochs=1,
            max_steps=RESUME_STEPS,
            checkpoint_every_steps=2,
            callbacks=callbacks,
        )
        return method.state_dict()

    if stop_after is not None:
        try:
            run([_StopAt(stop_after)])
        except _StoppedError:
            pass
        else:
            raise AssertionError("the run was to stop and did not")
    return run([])
