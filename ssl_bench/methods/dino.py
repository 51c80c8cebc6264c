"""DINO: a student matches the centered, sharpened output of its momentum teacher across crops.

Source: Caron et al. 2021, arXiv 2104.14294; official code facebookresearch/dino.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, global_mean
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.distillation import distillation_cross_entropy
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.dino_head import DINOHead
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("dino", family="self-distillation", version=1, paper="Caron et al. 2021", arxiv="2104.14294")
class DINO(SSLMethod):
    """Cross entropy between the teacher's and the student's prototype distributions over pairs of crops.

    The teacher sees the first two views, the student all. The center is the momentum mean of the teacher's raw
    logits over both global crops and all ranks; it is used before it moves, once an optimizer step. The
    teacher's backbone is the one that is evaluated. solo-learn's CIFAR setting has a constant teacher
    temperature of 0.07; the official default is 0.04. In a few hundred steps the teacher stays near uniform at
    0.04, so the setting for small data is sharper (0.02), takes more and smaller steps than the other methods, and
    leaves out local crops, which cost more than they gave.

    Args:
        backbone: The network to pretrain.
        num_prototypes: K; 65536 on ImageNet, a few thousand are enough on small data.
        hidden_dim: Width of the head's MLP.
        bottleneck_dim: Width of the head's unit vector.
        student_temperature: Temperature of the student.
        teacher_temperature: Temperature of the teacher after its warm-up.
        warmup_teacher_temperature: Temperature of the teacher at the start.
        warmup_teacher_epochs: Epochs of the linear warm-up.
        center_momentum: Weight of the past in the center.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
        freeze_prototypes_epochs: Epochs in which the prototypes are not trained.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adamw", base_lr=8e-3, weight_decay=0.04, warmup_epochs=0.5, epochs=8,
            global_batch_size=64, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-6, warmup_epochs=10, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="dino_multicrop", optimizer="adamw", base_lr=5e-4, weight_decay=0.04, end_weight_decay=0.4,
            warmup_epochs=10, clip_norm_per_parameter=3.0, epochs=100, global_batch_size=1024,
            source="official code, ViT",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"num_prototypes": 1024, "hidden_dim": 512, "bottleneck_dim": 128, "target_momentum": 0.99,
                  "teacher_temperature": 0.02, "warmup_teacher_temperature": 0.02, "freeze_prototypes_epochs": 0},
        "cifar": {"num_prototypes": 4096, "teacher_temperature": 0.07, "warmup_teacher_temperature": 0.07,
                  "target_momentum": 0.9995},
    }  # fmt: skip
    loss_is_sample_mean = True
    center: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        warmup_teacher_temperature: float = 0.04,
        warmup_teacher_epochs: int = 0,
        center_momentum: float = 0.9,
        target_momentum: float = 0.996,
        freeze_prototypes_epochs: int = 1,
    ) -> None:
        super().__init__(backbone)
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.warmup_teacher_temperature = warmup_teacher_temperature
        self.warmup_teacher_epochs = warmup_teacher_epochs
        self.center_momentum = center_momentum
        self.target_momentum = target_momentum
        self.freeze_prototypes_epochs = freeze_prototypes_epochs
        self.head = DINOHead(backbone.embed_dim, hidden_dim, bottleneck_dim, num_prototypes)
        self.target = TargetNetwork(nn.Sequential(backbone, self.head))
        self.register_buffer("center", torch.zeros(num_prototypes))
        self._logit_means: list[Tensor] = []

    @property
    def evaluation_backbone(self) -> Backbone:
        """The teacher's backbone."""
        backbone = self.target.module[0]  # type: ignore[index]
        assert isinstance(backbone, Backbone)
        return backbone

    def temperature_at(self, epoch: int) -> float:
        """Teacher temperature: linear warm-up over whole epochs, then constant."""
        if epoch >= self.warmup_teacher_epochs:
            return self.teacher_temperature
        share = epoch / self.warmup_teacher_epochs
        return self.warmup_teacher_temperature + share * (self.teacher_temperature - self.warmup_teacher_temperature)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Crops of one size pass together, so batch norm sees them as one batch (as the official code)."""
        student = at_least_float32(self.head(self._embed_crops(views))).split(len(batch))
        logits = at_least_float32(self.target(torch.cat(views[:2])))
        temperature = self.temperature_at(batch.epoch)
        teacher = ((logits - self.center) / temperature).softmax(1).split(len(batch))
        self._logit_means.append(global_mean(logits))
        losses = distillation_cross_entropy(student, teacher, student_temperature=self.student_temperature)
        entropy = -(teacher[0] * teacher[0].clamp(min=1e-30).log()).sum(1).mean()
        return LossOutput(batch_mean(losses), teacher_entropy=entropy)

    def _embed_crops(self, views: tuple[Tensor, ...]) -> Tensor:
        sizes = [view.shape[-1] for view in views]
        groups = [
            torch.cat([v for v, s in zip(views, sizes, strict=True) if s == size]) for size in dict.fromkeys(sizes)
        ]
        return torch.cat([self.backbone(group) for group in groups])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the prototypes fixed in the first epochs."""
        if self.current_epoch < self.freeze_prototypes_epochs:
            self.head.prototypes.grad = None

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the center, then the teacher."""
        if self._logit_means:
            mean = torch.stack(self._logit_means).mean(0).to(self.center.dtype)
            self.center.lerp_(mean, 1 - self.center_momentum)
            self._logit_means.clear()
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.head), momentum)
