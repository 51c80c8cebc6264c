"""Label-free figures of the embeddings of augmented training images: alignment and LiDAR."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.distributed import gather, rank, uneven_batches, world_size
from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.diagnostics.geometry import alignment
from ssl_bench.evaluation.diagnostics.lidar import lidar
from ssl_bench.evaluation.features import FeatureSet, evaluation_mode, evenly_spaced
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocol import Protocol, register_protocol
from ssl_bench.records import MetricRow

VIEWS = "simclr"  # one distribution for all backbones, whatever they were trained on
VIEWS_A_PASS = 2
DELTA = 1e-4


@register_protocol("view_geometry", version=1)
class ViewGeometry(Protocol):
    """Alignment of SimCLR's views of an image, and LiDAR: the rank of what tells images apart despite their views.

    Of the embedding, not the projection that the LiDAR paper also measures. Alignment is the mean squared distance
    on the unit sphere over all pairs of views of an image; without spread ("geometry" has uniformity) it says
    nothing, since collapse aligns perfectly. The same views for every backbone: those trained without augmentation
    have not been asked to ignore it.

    Args:
        num_images: At most so many training images, evenly spaced by index (1000 in LiDAR).
        num_views: Views of each, even (50 in LiDAR, 10 here for its cost).
    """

    needs = "backbone"

    def __init__(self, *, num_images: int = 1000, num_views: int = 10) -> None:
        if num_images < 2:
            raise ConfigError(f"`num_images` must be >= 2, got {num_images} (protocol view_geometry).")
        if num_views < 2 or num_views % VIEWS_A_PASS:
            raise ConfigError(f"`num_views` must be even and >= 2, got {num_views} (protocol view_geometry).")
        self.num_images = num_images
        self.num_views = num_views

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `alignment` and `lidar`, split "train"."""
        index = evenly_spaced(self.num_images, len(context.dataset.split("train")))
        if len(index) < 2:
            raise DataError(f"LiDAR needs at least 2 training images, got {len(index)}. Check the dataset's splits.")
        views = self._embed(context, index).to(context.device)
        directions = normalize(views.double(), dim=2, eps=1e-12)
        pairs = list(itertools.combinations(range(self.num_views), 2))
        aligned = sum(float(alignment(directions[:, a], directions[:, b])) for a, b in pairs) / len(pairs)
        common = {
            "layer": "embedding",
            "views": VIEWS,
            "num_views": self.num_views,
            "precision": "float64",
            "embed_dim": views.shape[2],
        }
        details = {**common, "normalized": "L2", "centered": False, "alpha": 2.0, "num_pairs": len(pairs) * len(index)}
        return [
            self.row("alignment", aligned, n_test=len(index), split="train", higher_is_better=False, details=details),
            self.row(
                "lidar",
                lidar(views, delta=DELTA),
                n_test=len(index),
                split="train",
                details={**common, "normalized": "none", "centered": True, "delta": DELTA, "eps": 1e-8},
            ),
        ]

    def _embed(self, context: EvaluationContext, index: Tensor) -> Tensor:
        """Embeddings of the views of some training images, (n, q, D) on the CPU, the same on every rank."""
        network = context.backbone()
        store = context.dataset.split("train")
        share = index.tensor_split(world_size())[rank()]
        passes = []
        with evaluation_mode(network), torch.autocast(context.device.type, enabled=False):
            for epoch in range(self.num_views // VIEWS_A_PASS):
                parts = [torch.empty(0, VIEWS_A_PASS, network.embed_dim, device=context.device)]
                for batch in view_batches(
                    store,
                    context.views(VIEWS),
                    share.split(context.batch_size) if len(share) else (),
                    epoch=epoch,
                    seed=context.seed,
                    device=context.device,
                    num_workers=context.num_workers,
                ):
                    parts.append(torch.stack([network(view).float() for view in batch.views], dim=1))
                passes.append(torch.cat(parts))
        with uneven_batches():
            views = gather(torch.cat(passes, dim=1)).cpu()
        FeatureSet(views.flatten(1), torch.full_like(index, -1), index)  # finite, or an error that names the image
        return views
