"""DIET: classify every image as itself, one class a datum.

Source: Balestriero 2023, arXiv 2302.10260 (and Ibrahim et al. 2024, arXiv 2406.10743); no official code is known, so
a public script for CIFAR-100 is followed where the abstracts are silent.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def index_cross_entropy(logits: Tensor, index: Tensor, *, label_smoothing: float) -> Tensor:
    """Cross entropy of each row to (1 - s) onehot(index) + s / N over the N classes, (B, N), (B,) -> (B,)."""
    return F.cross_entropy(logits, index, label_smoothing=label_smoothing, reduction="none")


@register_method("diet", family="other", version=1, paper="Balestriero 2023", arxiv="2302.10260")
class DIET(SSLMethod):
    """L = mean over images n of CE(softmax(W f(x_n)), (1 - s) onehot(n) + s / N), W of shape (N, K), without bias.

    n is the image's index in the pretraining split, whatever the order of an epoch. One view, no projector and
    no pairs. The smoothed share s / N also goes to the true class. The view recipe leaves out the script's random
    erasing, which our pipeline does not have, and on small images its blur (probability 0.2), as all of ours do.

    Cost: W has N K entries, and with its gradient and Adam's two moments takes 16 N K bytes; a step costs 6 B N K
    operations for W alone, and with several processes an all-reduce of all of its gradient. For N = 50,000 images
    and K = 512 these are 26 M parameters and 0.4 GB, for ImageNet and K = 2048 2.6 G parameters and 42 GB: meant
    for up to a few hundred thousand images. A checkpoint holds W, and fits only a split of the same size.

    Args:
        backbone: The network to pretrain.
        num_samples: N, images of the pretraining split; filled in from the data.
        label_smoothing: s.
    """

    recipes = {
        "small": Recipe(
            views="diet", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="diet", optimizer="adamw", base_lr=1e-3, weight_decay=0.05, exclude_bias_and_norm=False,
            warmup_epochs=10, warmup_start_lr=8e-3 / 3, end_lr_factor=1e-3, epochs=1000, global_batch_size=2048,
            source="public script, CIFAR-100",
        ),
    }  # fmt: skip
    loss_is_sample_mean = True
    min_global_batch = 1

    def __init__(self, backbone: Backbone, *, num_samples: int, label_smoothing: float = 0.8) -> None:
        super().__init__(backbone)
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"`label_smoothing` of diet must lie in [0, 1), got {label_smoothing}. Correct the method's arguments."
            )
        self.label_smoothing = label_smoothing
        self.classifier = nn.Linear(backbone.embed_dim, num_samples, bias=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Cross entropy to the smoothed index of each image."""
        logits = self.classifier(self.backbone(views[0]))
        losses = index_cross_entropy(logits, batch.index, label_smoothing=self.label_smoothing)
        accuracy = (logits.detach().argmax(1) == batch.index).float().mean()
        return LossOutput(batch_mean(losses), accuracy=accuracy)
