"""Random teacher: a student distills a frozen, random copy of itself, without labels and augmentation.

Source: Sarnthein et al. 2023, arXiv 2302.12091; official code safelix/dinopl.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.clustering import swapped_cross_entropy
from ssl_bench.losses.common import at_least_float32
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone, build_backbone
from ssl_bench.nn.dino_head import DINOHead
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method(
    "random_teacher", family="self-distillation", version=1, paper="Sarnthein et al. 2023", arxiv="2302.12091"
)
class RandomTeacher(SSLMethod):
    """L = -sum_k softmax(t)_k log softmax(s)_k on the image itself; t, s are cosine logits of teacher and student.

    The teacher is random, never updated, and always in evaluation mode, so that its batch norms keep their initial
    statistics. L is the KL divergence (the paper's loss) plus the teacher's constant entropy, as in the official code.

    The student starts at ((1 - a) T + a R) / sqrt(a^2 + (1 - a)^2), with T the teacher's weights and R others
    drawn alike; all trainable weights are divided, as in the code's variance-preserving mode. The code's default
    a = 0 is a copy: there the gradient of a network without batch norm is exactly zero and nothing trains. Hence
    a is 0.001 here, which any network can start from. The setting for small data takes independent weights and small
    batches: a student near its teacher did not gain on it within a few epochs, and more steps gained more. The
    gain over the untrained network stays small at that length (k-NN 0.78 from 0.77 after four epochs), within the
    noise of `ssl-bench check`; the paper trains for a hundred epochs.

    Args:
        backbone: The network to pretrain; its weights are the teacher's.
        num_prototypes: K, the number of logits.
        hidden_dim: Width of the head's MLP.
        bottleneck_dim: Width of the head's unit vector.
        student_distance: a: 0 for a copy of the teacher, 1 for a student independent of it.
    """

    recipes = {
        "small": Recipe(
            views="eval", optimizer="adam", base_lr=1e-3, lr_scaling="none", weight_decay=1e-6, warmup_epochs=0.5,
            epochs=8, global_batch_size=32, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="eval", optimizer="adamw", base_lr=1e-3, lr_scaling="none", weight_decay=0.0, schedule="constant",
            warmup_epochs=0, epochs=100, global_batch_size=256, source="official configuration, CIFAR-10, version 2",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"num_prototypes": 1024, "hidden_dim": 512, "bottleneck_dim": 128, "student_distance": 1.0},
    }
    loss_is_sample_mean = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        student_distance: float = 1e-3,
    ) -> None:
        super().__init__(backbone)
        if not 0 <= student_distance <= 1:
            raise ConfigError(
                f"`student_distance` must be in [0, 1], got {student_distance} (method random_teacher). Take 0 for a "
                "copy of the teacher, 1 for independent weights."
            )
        widths = (backbone.embed_dim, hidden_dim, bottleneck_dim, num_prototypes)
        self.head = DINOHead(*widths)
        student = nn.Sequential(backbone, self.head)
        self.teacher = TargetNetwork(student)
        if student_distance:
            others = nn.Sequential(build_backbone(backbone.name, **backbone.arguments), DINOHead(*widths))
            scale = 1 / math.hypot(student_distance, 1 - student_distance)
            with torch.no_grad():
                for own, other in zip(student.parameters(), others.parameters(), strict=True):
                    if own.requires_grad:
                        own.lerp_(other, student_distance).mul_(scale)

    def train(self, mode: bool = True) -> RandomTeacher:
        """Set the student's mode; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Mean over images; teacher and student see the same view."""
        (view,) = views
        student = self.head(self.backbone(view))
        teacher = at_least_float32(self.teacher(view)).log_softmax(1)
        total = batch_mean(swapped_cross_entropy(teacher.exp(), student, temperature=1.0))
        return LossOutput(total, divergence=total + batch_mean((teacher.exp() * teacher).sum(1)))
