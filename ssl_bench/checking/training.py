"""The points of `ssl-bench check` that train: resume, and learning beyond the untrained backbone."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from scipy.stats import binomtest
from torch import Tensor

from ssl_bench.checking.points import kinds_of, make_method, make_views
from ssl_bench.data import PretrainDataModule
from ssl_bench.data.dataset import Dataset
from ssl_bench.evaluation.protocols.knn import knn_rankings
from ssl_bench.methods import METHODS, SSLMethod
from ssl_bench.records import Batch
from ssl_bench.training import pretrain
from ssl_bench.views import build_views

RESUME_STEPS = 5
LEARN_SEEDS = (0, 1)
K = 20


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
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


def check_resume(name: str, dataset: Dataset) -> str:
    """Point 5: 5 steps, against 3 steps and a resume from the checkpoint at step 2."""
    with tempfile.TemporaryDirectory() as folder:
        whole = final_state(name, dataset, Path(folder) / "whole", stop_after=None)
        resumed = final_state(name, dataset, Path(folder) / "parts", stop_after=3)
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), f"{key} differs after a resume"
    return "bitwise"


def check_learns(name: str, dataset: Dataset) -> str:
    """Point 7: the class's recipe for small data beats the untrained network under k-NN on validation.

    Every seed must gain, and over the seeds' images together the gain must be significant (one-sided McNemar
    test at 5 %: images only the trained network gets right against those only the untrained one does).

    Raises:
        AssertionError: With both accuracies, if the gain is not supported.
    """
    cls = METHODS.get(name)
    kind = kinds_of(name)[0]
    recipe, views = make_views(name, dataset)
    gained = lost = 0
    before, after = [], []
    for seed in LEARN_SEEDS:
        method = make_method(name, kind, dataset, views.num_views, seed=seed)
        untrained = _knn_hits(method, dataset)
        data = PretrainDataModule(
            dataset, views, global_batch_size=recipe.global_batch_size, seed=seed, with_labels=cls.uses_labels
        )
        with tempfile.TemporaryDirectory() as folder:
            pretrain(method, data, folder=Path(folder), recipe=recipe, epochs=recipe.epochs)
        trained = _knn_hits(method, dataset)
        gained += int((trained & ~untrained).sum())
        lost += int((untrained & ~trained).sum())
        before.append(float(untrained.double().mean()))
        after.append(float(trained.double().mean()))
    figures = ", ".join(f"{a:.3f} from {b:.3f}" for a, b in zip(after, before, strict=True))
    summary = f"k-NN {figures} in {recipe.epochs} epochs"
    assert all(a > b for a, b in zip(after, before, strict=True)), f"no gain at every seed: {summary}"
    assert binomtest(gained, gained + lost, alternative="greater").pvalue < 0.05, f"gain within noise: {summary}"
    return summary


def _knn_hits(method: SSLMethod, dataset: Dataset) -> Tensor:
    views = build_views(
        "eval", image_size=dataset.image_size, channels=dataset.channels, mean=dataset.mean, std=dataset.std
    )
    embeddings, labels = {}, {}
    for split in ("train", "validation"):
        store = dataset.split(split)
        index = torch.arange(len(store))
        batches = (
            views(Batch(images=store.take(part), index=part, epoch=0, seed=0)).views[0] for part in index.split(512)
        )
        embeddings[split] = torch.cat([method.embed(images) for images in batches])
        labels[split] = torch.from_numpy(store.labels)
    ranking = knn_rankings(
        embeddings["train"],
        labels["train"],
        embeddings["validation"],
        ks=[K],
        temperature=0.07,
        num_classes=dataset.num_classes,
    )[K]
    hits: Tensor = ranking[:, 0] == labels["validation"]
    return hits
