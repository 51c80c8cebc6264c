"""RMQM: how far and how evenly embeddings of test images move under growing noise and under a growing attack."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ssl_bench.distributed import gather, rank, uneven_batches, world_size
from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.diagnostics.manifold_quality import manifold_quality
from ssl_bench.evaluation.features import FeatureSet, evaluation_mode, evenly_spaced
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocol import Protocol, register_protocol
from ssl_bench.losses.contrastive import nt_xent
from ssl_bench.random import normal, sample_keys
from ssl_bench.records import Batch, MetricRow

MAX_BATCH = 128  # images attacked together, each the others' negatives; fixed, so that nothing else changes rows
STEP = 1 / 255  # of the attack, in pixels from 0 to 1
TEMPERATURE = 0.07
VIEWS = "simclr"


@register_protocol("rmqm", version=1)
class RMQM(Protocol):
    """Representation manifold quality under white noise and under gradient ascent of a contrastive loss.

    Source: Botha et al. 2022, arXiv 2205.07477, and the authors' code. No labels are used. Alterations are of pixels
    in [0, 1], before normalization; the representation is the embedding (theirs: the projection).

    Noise: standard deviations evenly from 0 to 1, clipped. Differs: one standard normal field an image, scaled; fresh
    noise at every level makes the steps between levels erratic however small they are. Differs: 20 levels, not 100.

    Attack: level a is a steps of 1/255 along the sign of the gradient of NT-Xent (temperature 0.07) between the
    altered images and an augmented view of the originals, fresh at every step; the same for every backbone, also those
    trained with labels or without contrast. Differs: views of SimCLR; and step t uses the same view at every level, by
    which a level continues the one before instead of being restarted. Their limit of 0.3 is out of reach.

    Args:
        num_images: At most so many test images, evenly spaced by index.
        noise_levels: Levels of noise, the original among them.
        attack_levels: Levels of the attack, the original among them.
    """

    needs = "backbone"

    def __init__(self, *, num_images: int = 1000, noise_levels: int = 20, attack_levels: int = 30) -> None:
        if num_images < 2:
            raise ConfigError(f"`num_images` must be >= 2, got {num_images} (protocol rmqm).")
        for name, levels in (("noise_levels", noise_levels), ("attack_levels", attack_levels)):
            if levels < 3:
                raise ConfigError(f"`{name}` must be >= 3, got {levels} (protocol rmqm).")
        self.num_images = num_images
        self.noise_levels = noise_levels
        self.attack_levels = attack_levels

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `rmqm_noise` and `rmqm_attack`, split "test"."""
        index = evenly_spaced(self.num_images, len(context.dataset.split("test")))
        if len(index) < 2:
            raise DataError(f"RMQM needs at least 2 test images, got {len(index)}. Check the dataset's splits.")
        alterations = _Alterations(context)
        noise = {"levels": self.noise_levels, "largest_deviation": 1.0, "field": "one an image, scaled"}
        attack = {
            "levels": self.attack_levels,
            "step": STEP,
            "loss": "NT-Xent of embeddings",
            "temperature": TEMPERATURE,
            "views": VIEWS,
            "max_batch": MAX_BATCH,
        }
        return [
            self._row("rmqm_noise", index, alterations.embed_all(alterations.noise, index, self.noise_levels), noise),
            self._row(
                "rmqm_attack", index, alterations.embed_all(alterations.attack, index, self.attack_levels), attack
            ),
        ]

    def _row(self, metric: str, index: Tensor, levels: Tensor, settings: dict[str, Any]) -> MetricRow:
        FeatureSet(levels.flatten(1), torch.full_like(index, -1), index)  # finite, or an error that names the image
        found = manifold_quality(levels)
        dropped = max(found.num_dropped)
        note = ""
        if math.isnan(found.value):
            note = "no image moves at every level" if found.to_original else "no image moves at all"
        elif dropped:
            note = f"{dropped} images that do not move at some level are left out of the changes"
        if found.is_clipped:
            note = "; ".join(filter(None, (note, "a change below 1e-6 was taken as 1e-6")))
        return self.row(
            metric,
            None if math.isnan(found.value) else found.value,
            n_test=len(index),
            note=note,
            details={
                "layer": "embedding",
                "view": "eval, altered",
                "normalized": "L2",
                "centered": False,
                "precision": "float64",
                "embed_dim": levels.shape[2],
                **settings,
                "to_original": found.to_original,
                "to_previous": found.to_previous,
                "change_to_original": _number(found.change_to_original),
                "change_to_previous": _number(found.change_to_previous),
                "num_dropped": list(found.num_dropped),
                "curve": found.curve,
            },
        )


class _Alterations:
    """Embeddings of test images and of what becomes of them.

    Args:
        context: Backbone, images, seed and device.
    """

    def __init__(self, context: EvaluationContext) -> None:
        self.context = context
        self.network = context.backbone().requires_grad_(False)
        self.store = context.dataset.split("test")
        self.original, self.views = context.views("eval"), context.views(VIEWS)
        shape = (-1, 1, 1)
        self.mean = torch.tensor(self.original.mean, device=context.device).view(shape)
        self.std = torch.tensor(self.original.std, device=context.device).view(shape)

    def embed_all(self, embed: Callable[[Tensor, int], Tensor], index: Tensor, num_levels: int) -> Tensor:
        """`embed` for every image, (N, A, D) on the CPU, the same on every rank; each one computes some batches."""
        batches = index.tensor_split(math.ceil(len(index) / MAX_BATCH))
        own = torch.arange(len(batches)).tensor_split(world_size())[rank()].tolist()
        empty = torch.empty(0, num_levels, self.network.embed_dim, device=self.context.device)
        with uneven_batches():
            return gather(torch.cat([empty, *(embed(batches[number], num_levels) for number in own)])).cpu()

    def noise(self, index: Tensor, num_levels: int) -> Tensor:
        """Embeddings under noise of 0 to 1, (B, A, D)."""
        with self._running():
            pixels = self._pixels(index)
            keys = sample_keys(self.context.seed, 0, index, "rmqm_noise")
            field = normal(keys, pixels[0].numel(), "field").view(pixels.shape).to(pixels.device)
            deviations = torch.linspace(0, 1, num_levels).tolist()
            return torch.stack([self._embed((pixels + sd * field).clamp(0, 1)) for sd in deviations], dim=1)

    def attack(self, index: Tensor, num_levels: int) -> Tensor:
        """Embeddings after 0 to A - 1 steps of the attack, (B, A, D)."""
        found = []
        with self._running():
            pixels = self._pixels(index)
            for step in range(num_levels - 1):
                pass_, view = divmod(step, self.views.num_views)
                if view == 0:
                    batch = self._views(self.views, index, epoch=pass_)
                reference = self.network(batch.views[view]).float()
                with torch.enable_grad():
                    pixels.requires_grad_(True)
                    embedding = self._embed(pixels)
                    loss = nt_xent(reference, embedding, reference, embedding, temperature=TEMPERATURE).mean()
                    (gradient,) = torch.autograd.grad(loss, pixels)
                found.append(embedding.detach())
                pixels = (pixels.detach() + STEP * gradient.sign()).clamp(0, 1)
            return torch.stack([*found, self._embed(pixels)], dim=1)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with evaluation_mode(self.network), torch.autocast(self.context.device.type, enabled=False):
            yield

    def _embed(self, pixels: Tensor) -> Tensor:
        embedding: Tensor = self.network((pixels - self.mean) / self.std).float()
        return embedding

    def _pixels(self, index: Tensor) -> Tensor:
        """Images of the evaluation view, in [0, 1]."""
        return (self._views(self.original, index).views[0] * self.std + self.mean).clamp(0, 1)

    def _views(self, views: Any, index: Tensor, epoch: int = 0) -> Batch:
        context = self.context
        batches = view_batches(
            self.store,
            views,
            [index],
            epoch=epoch,
            seed=context.seed,
            device=context.device,
            num_workers=context.num_workers,
        )
        return next(batches)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
