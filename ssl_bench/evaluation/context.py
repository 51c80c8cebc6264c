"""What a protocol may see of a trained backbone and its dataset."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ssl_bench.distributed import is_rank_zero
from ssl_bench.evaluation.features import FeatureSet, backbone_hash, cached_features
from ssl_bench.nn.backbone import Backbone
from ssl_bench.views import build_views


class EvaluationContext:
    """One frozen backbone on one dataset; features are extracted when first asked for.

    Args:
        backbone: The network to evaluate; it is copied, so nothing here can change the caller's.
        dataset: Its splits, class count and fingerprint.
        work_dir: Folder for cached features and per-sample predictions.
        seed: Seed of everything random in a protocol.
        device: Where networks run and solvers compute.
        batch_size: Images a forward pass when extracting.
        num_workers: Loader processes for large images.
    """

    def __init__(
        self,
        backbone: Backbone,
        dataset: Any,
        *,
        work_dir: Path,
        seed: int = 0,
        device: torch.device | str = "cpu",
        batch_size: int = 512,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.work_dir = Path(work_dir)
        self.seed = seed
        self.device = torch.device(device)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._backbone = copy.deepcopy(backbone).to(self.device)
        self._features: dict[str, FeatureSet] = {}

    @cached_property
    def backbone_sha256(self) -> str:
        """Content hash of the backbone."""
        return backbone_hash(self._backbone)

    def features(self, split: str) -> FeatureSet:
        """Features of a split, from memory, from the cache or extracted now."""
        if split not in self._features:
            self._features[split] = cached_features(
                self._backbone,
                self.dataset,
                split,
                folder=self.work_dir / "features",
                backbone_sha256=self.backbone_sha256,
                batch_size=self.batch_size,
                device=self.device,
                num_workers=self.num_workers,
            )
        return self._features[split]

    def on(self, dataset: Any) -> EvaluationContext:
        """The same backbone, seed and folder on another dataset whose images have the same size and channels."""
        return EvaluationContext(
            self._backbone,
            dataset,
            work_dir=self.work_dir,
            seed=self.seed,
            device=self.device,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    def backbone(self) -> Backbone:
        """A fresh copy that may be trained."""
        return copy.deepcopy(self._backbone)

    def views(self, name: str) -> Any:
        """A view pipeline at the dataset's size and statistics."""
        data = self.dataset
        return build_views(name, image_size=data.image_size, channels=data.channels, mean=data.mean, std=data.std)

    @property
    def writes(self) -> bool:
        """Whether this process writes files."""
        return is_rank_zero()
