"""Features of a frozen backbone: extracted once, every sample exactly once, cached by content.

Shapes: M samples of a split, D embedding width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ssl_bench.distributed import gather, is_distributed, is_rank_zero, rank, uneven_batches, world_size
from ssl_bench.errors import DataError
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.nn.backbone import Backbone
from ssl_bench.results.store import replacing
from ssl_bench.views import build_views


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """Embeddings of a split, on the CPU, in the order of the sample index.

    Attributes:
        features: (M, D) float32, finite.
        labels: (M,) int64; -1 where unlabelled.
        index: (M,) int64, place of each sample in its split.
        note: What happened on the way, for the rows made from it.

    Raises:
        DataError: If a feature is NaN or infinite, or the shapes do not fit.
    """

    features: Tensor
    labels: Tensor
    index: Tensor
    note: str = ""

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or len(self.features) != len(self.labels) or len(self.labels) != len(self.index):
            raise DataError(
                f"A feature set must hold (M, D) features, (M,) labels and (M,) indices, got "
                f"{tuple(self.features.shape)}, {tuple(self.labels.shape)}, {tuple(self.index.shape)}."
            )
        bad = ~torch.isfinite(self.features).all(dim=1)
        if bad.any():
            raise DataError(
                f"Features must be finite, got NaN or infinity in {int(bad.sum())} of {len(bad)} samples, first at "
                f"index {int(self.index[bad][0])}. The backbone has diverged, or its input is out of range."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dim(self) -> int:
        """Width D of the features."""
        return self.features.shape[1]

    def joined(self, other: FeatureSet) -> FeatureSet:
        """This set followed by another (train + validation)."""
        return FeatureSet(
            torch.cat([self.features, other.features]),
            torch.cat([self.labels, other.labels]),
            torch.cat([self.index, other.index]),
            "; ".join(filter(None, (self.note, other.note))),
        )


def evenly_spaced(num: int, total: int) -> Tensor:
    """`num` indices, at most all, spread over range(total), ascending, int64."""
    used = min(num, total)
    return torch.arange(used) * total // max(used, 1)


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule in evaluation mode, without gradient, and restore each one's mode."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, training in modes:
            child.training = training


def evaluation_views(dataset: Any) -> Any:
    """The view without randomness, at the size and statistics of the dataset."""
    return build_views(
        "eval", image_size=dataset.image_size, channels=dataset.channels, mean=dataset.mean, std=dataset.std
    )


def extract_features(
    backbone: Backbone,
    dataset: Any,
    split: str,
    *,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
) -> FeatureSet:
    """Embed a split: evaluation mode, float32, evaluation view, each sample once at any world size.

    Every rank embeds a contiguous share and all ranks get the whole set. Weights, buffers and modes
    of the backbone are as before.

    Raises:
        DataError: If the backbone does not give one finite vector an image.
    """
    store = dataset.split(split)
    features = run_on_store(
        backbone,
        store,
        evaluation_views(dataset),
        width=backbone.embed_dim,
        batch_size=batch_size,
        device=device,
        num_workers=num_workers,
    )
    return FeatureSet(features, torch.from_numpy(store.labels.copy()), torch.arange(len(store)))


def run_on_store(
    network: nn.Module,
    store: Any,
    views: Any,
    *,
    width: int,
    index: Tensor | None = None,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
) -> Tensor:
    """Outputs of a network in evaluation mode for some images of a store, on the CPU in their order.

    Args:
        network: Gives (B, width) for (B, C, H, W).
        store: An `ImageStore`.
        views: A pipeline of one view.
        width: Expected width of the output.
        index: Which images, (M,); all by default.
        batch_size: Images a forward pass.
        device: The network's device.
        num_workers: Loader processes for large images.

    Returns:
        (M, width) float32, the same on every rank.

    Raises:
        DataError: If the network does not give one vector of that width an image.
    """
    device = torch.device(device)
    index = torch.arange(len(store)) if index is None else index
    share = index.tensor_split(world_size())[rank()]
    parts = [torch.empty(0, width, device=device)]
    with evaluation_mode(network), torch.autocast(device.type, enabled=False):
        batches = share.split(batch_size) if len(share) else ()
        for batch in view_batches(store, views, batches, device=device, num_workers=num_workers):
            output = network(batch.views[0])
            if output.shape != (len(batch), width):
                raise DataError(
                    f"{type(network).__name__} must give ({len(batch)}, {width}) for {len(batch)} images, got "
                    f"{tuple(output.shape)}. Pool or flatten its output, or correct its embed_dim."
                )
            parts.append(output.float())
    with uneven_batches():
        return gather(torch.cat(parts)).cpu()


def backbone_hash(backbone: Backbone) -> str:
    """SHA-256 of what determines the embeddings: class, arguments, parameters and buffers."""
    entry = getattr(backbone, "registry_entry", None)
    facts = [type(backbone).__qualname__, entry.version if entry else 0, getattr(backbone, "arguments", {})]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, value in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cached_features(
    backbone: Backbone,
    dataset: Any,
    split: str,
    *,
    folder: Path,
    backbone_sha256: str | None = None,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
) -> FeatureSet:
    """`extract_features`, kept in a safetensors file named by everything that determines its content.

    A damaged file is extracted again; the set's `note` says so. Ranks agree on whether to extract.
    """
    facts = {
        "backbone": backbone_sha256 or backbone_hash(backbone),
        "dataset": dataset.fingerprint,
        "split": split,
        "view": evaluation_views(dataset).describe(),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    path = folder / f"{split}-{key[:16]}.safetensors"
    found, note = _read(path, key)
    if _everywhere(found is not None, device):
        assert found is not None
        return found
    fresh = extract_features(backbone, dataset, split, batch_size=batch_size, device=device, num_workers=num_workers)
    if is_rank_zero():
        tensors = {"features": fresh.features, "labels": fresh.labels, "index": fresh.index}
        with replacing(path) as temporary:
            safetensors.torch.save_file(tensors, temporary, metadata={"key": key, "sha256": _digest(tensors)})
    return dataclasses.replace(fresh, note=note)


def _read(path: Path, key: str) -> tuple[FeatureSet | None, str]:
    """The stored set, or None and the reason if there is a file but it cannot be used."""
    if not path.exists():
        return None, ""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("features", "labels", "index")}
        if metadata.get("key") == key and metadata.get("sha256") == _digest(tensors):
            return FeatureSet(**tensors), ""
    except (SafetensorError, OSError):
        pass
    return None, f"the stored features {path.name} were damaged and were extracted again"


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()


def _everywhere(condition: bool, device: torch.device | str) -> bool:
    """Whether the condition holds on every rank."""
    if not is_distributed():
        return condition
    flag = torch.tensor(int(condition), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
