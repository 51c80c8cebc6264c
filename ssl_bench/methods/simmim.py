"""SimMIM: regress the pixels of masked patches from an encoder that sees mask tokens in their place.

Source: Xie et al. 2022, arXiv 2111.09886; official code microsoft/SimMIM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision
from ssl_bench.losses.reconstruction import patchify
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.backbones.vit import ViT, require_vit
from ssl_bench.nn.masking import num_kept, random_mask
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def masked_l1(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean absolute error over the masked patches of each image, (B, L, V), (B, L, V), (B, L) -> (B,)."""
    weight = mask.to(prediction.dtype)
    return ((prediction - target).abs().mean(-1) * weight).sum(1) / weight.sum(1)


@register_method("simmim", family="masked-image-modeling", version=1, paper="Xie et al. 2022", arxiv="2111.09886")
class SimMIM(SSLMethod):
    """L = sum over masked pixels of |x - x'| / their number, on raw pixels; x' is linear in each output token.

    The encoder sees the whole grid: a learned token replaces each masked patch embedding before positions are added.
    ceil(mask_ratio n) of n square cells are masked. With equal counts in every image, the mean over images is the
    official code's ratio of sums without its 1e-5 in the denominator. The linear head is the code's 1x1 convolution
    and pixel shuffle. The backbone is this package's ViT, with absolute positions in place of the code's shared
    relative bias, and without LayerScale and drop path. The authors give no setting for small images; there cells
    are single patches.

    Args:
        backbone: A ViT.
        mask_ratio: Share of masked cells.
        cell_patches: Side of a masked cell in patches; must divide the grid of patches.
    """

    recipes = {
        "small": Recipe(
            views="simmim", optimizer="adamw", base_lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=1,
            epochs=8, global_batch_size=64, source="ours, MAE's setting for small data, not tuned",
        ),
        "imagenet": Recipe(
            views="simmim", optimizer="adamw", base_lr=5e-5, weight_decay=0.05, schedule="step", milestones=(0.875,),
            warmup_epochs=10, warmup_start_lr=2e-6, clip_norm=5.0, epochs=800, global_batch_size=2048,
            source="official configuration, ViT-B; batch size of its Swin example",
        ),
    }  # fmt: skip
    arguments = {"small": {"cell_patches": 1}}
    backbones = ("vit",)
    loss_is_sample_mean = True
    min_global_batch = 1
    backbone: ViT

    def __init__(self, backbone: Backbone, *, mask_ratio: float = 0.6, cell_patches: int = 2) -> None:
        super().__init__(backbone)
        vit = require_vit(backbone, "SimMIM")
        if cell_patches < 1 or any(side % cell_patches for side in vit.grid):
            raise ConfigError(
                f"`cell_patches` must divide the {vit.grid[0]} x {vit.grid[1]} grid of patches, got {cell_patches} "
                "(method simmim). Change the method's cell_patches or the backbone's patch_size."
            )
        self.mask_ratio = mask_ratio
        self.cell_patches = cell_patches
        self.cells = (vit.grid[0] // cell_patches, vit.grid[1] // cell_patches)
        num_kept(self.cells[0] * self.cells[1], mask_ratio)  # refuses a ratio that masks nothing or all before training
        self.mask_token = nn.Parameter(torch.empty(vit.width))
        nn.init.trunc_normal_(self.mask_token, std=0.02, a=-0.02, b=0.02)
        self.head = nn.Linear(vit.width, vit.patch_size**2 * vit.patch_embed.in_channels)

    def mask(self, batch: Batch) -> Tensor:
        """Masked patches, (B, L) bool."""
        _, cells = random_mask(batch.keys("mask"), self.cells[0] * self.cells[1], self.mask_ratio)
        grid: Tensor = cells.unflatten(1, self.cells)
        return grid.repeat_interleave(self.cell_patches, 1).repeat_interleave(self.cell_patches, 2).flatten(1)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Error on the masked patches of the one view."""
        images, mask = views[0], self.mask(batch)
        tokens = self.backbone.forward_tokens(images, mask=mask, mask_token=self.mask_token)
        prediction = self.head(tokens[:, 1:])
        return LossOutput(batch_mean(masked_l1(prediction, patchify(images, self.backbone.patch_size), mask)))
