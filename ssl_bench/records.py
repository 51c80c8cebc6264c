"""Frozen records that cross rooms: a batch, a loss, a metric row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ssl_bench.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """One training batch on this rank (B samples).

    `images` are stored bytes: (B, C, H, W) uint8, or, for large images, a tuple with one (B, C, h, w)
    uint8 crop a view. `views` are floating point, made on the device by the view pipeline: one
    (B, C, h, w) tensor a view. `labels` is None unless the method declares `uses_labels`.
    """

    images: Tensor | tuple[Tensor, ...]
    index: Tensor
    epoch: int
    seed: int
    views: tuple[Tensor, ...] = ()
    labels: Tensor | None = None

    def __len__(self) -> int:
        return int(self.index.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move every tensor; Lightning calls this."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        images = tuple(map(move, self.images)) if isinstance(self.images, tuple) else move(self.images)
        return dataclasses.replace(
            self,
            images=images,
            index=move(self.index),
            views=tuple(map(move, self.views)),
            labels=None if self.labels is None else move(self.labels),
        )

    def pin_memory(self) -> Batch:
        """Pin the host tensors; the DataLoader calls this."""
        pinned = (
            tuple(x.pin_memory() for x in self.images) if isinstance(self.images, tuple) else self.images.pin_memory()
        )
        return dataclasses.replace(self, images=pinned, index=self.index.pin_memory())

    def keys(self, stream: str) -> Tensor:
        """Random keys of these samples for one stream, shape (B,); see `ssl_bench.random`.

        Every random number of a method is drawn from such keys, never from torch's generator:
        `uniform(batch.keys("mask"), num_patches, "order")`.
        """
        from ssl_bench.random import sample_keys

        return sample_keys(self.seed, self.epoch, self.index, stream)


class LossOutput:
    """The loss to minimize and its named parts, all scalars; only the base class logs them."""

    __slots__ = ("terms", "total")

    def __init__(self, total: Tensor, **terms: Tensor) -> None:
        self.total = total
        self.terms = {name: value.detach() for name, value in terms.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One measured number of one protocol: what `rows.csv` holds beside the trial's identity.

    `value` is raw: accuracies are fractions in [0, 1]. `value` None means "could not be measured";
    then `note` says why. `selected_on` names the split that chose the hyper-parameters, or "none".
    `details` holds settings and extra figures (chosen l2, k, thresholds), JSON types only.
    """

    protocol: str
    protocol_version: int
    metric: str
    value: float | None
    higher_is_better: bool
    n_test: int
    split: str = "test"
    selected_on: str = "none"
    note: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is trained on one family of data: views, optimizer, schedule.

    `base_lr` is per 256 images; `ssl_bench.optim` alone turns it into `lr` by `lr_scaling`.
    Durations carry their unit; `warmup_epochs` may be fractional. `source` says where it comes from.
    """

    views: str
    optimizer: str = "sgd"  # sgd | adam | adamw | lars
    base_lr: float = 0.06
    lr_scaling: str = "linear"  # linear: x B/256 | sqrt: x sqrt(B/256) | none
    weight_decay: float = 1e-4
    end_weight_decay: float | None = None  # cosine from weight_decay to this; None keeps it constant
    exclude_bias_and_norm: bool = True  # 1-d parameters get no weight decay (and no LARS adaptation)
    momentum: float = 0.9  # SGD and LARS
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)  # Adam and AdamW
    lars_trust: float = 0.001
    lars_clip: bool = False  # LARC-style: the adapted rate never exceeds lr
    schedule: str = "cosine"  # cosine | constant | step
    milestones: tuple[float, ...] = ()  # step: fractions of training at which lr is multiplied by step_factor
    step_factor: float = 0.1
    warmup_epochs: float = 10.0
    warmup_start_lr: float = 0.0
    end_lr_factor: float = 0.0  # lr at the last step / peak lr
    clip_norm: float | None = None  # global gradient norm
    clip_norm_per_parameter: float | None = None  # each tensor's own norm (DINO)
    global_batch_size: int = 256
    epochs: int = 1000
    source: str = ""

    def __post_init__(self) -> None:
        def need(ok: bool, what: str, got: object) -> None:
            if not ok:
                raise ConfigError(f"`{what}`, got {got!r} (in a recipe for views {self.views!r}).")

        need(
            self.optimizer in ("sgd", "adam", "adamw", "lars"),
            "optimizer must be sgd, adam, adamw or lars",
            self.optimizer,
        )
        need(self.lr_scaling in ("linear", "sqrt", "none"), "lr_scaling must be linear, sqrt or none", self.lr_scaling)
        need(
            self.schedule in ("cosine", "constant", "step"), "schedule must be cosine, constant or step", self.schedule
        )
        need(self.base_lr >= 0, "base_lr must be >= 0", self.base_lr)
        need(self.weight_decay >= 0, "weight_decay must be >= 0", self.weight_decay)
        need(
            self.end_weight_decay is None or self.weight_decay > 0,
            "weight_decay must be > 0 where end_weight_decay is given",
            self.weight_decay,
        )
        need(0 <= self.momentum < 1, "momentum must be in [0, 1)", self.momentum)
        need(self.warmup_epochs >= 0, "warmup_epochs must be >= 0", self.warmup_epochs)
        need(self.global_batch_size >= 1, "global_batch_size must be >= 1", self.global_batch_size)
        need(self.epochs >= 0, "epochs must be >= 0", self.epochs)
