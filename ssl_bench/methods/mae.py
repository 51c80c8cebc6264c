"""MAE: reconstruct masked patches from a few visible ones.

Source: He et al. 2022, arXiv 2111.06377; official code facebookresearch/mae.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.reconstruction import masked_mse, normalize_patches, patchify, unpatchify
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.backbones.vit import ViT, require_vit
from ssl_bench.nn.masking import num_kept, random_mask
from ssl_bench.nn.positions import grid_code
from ssl_bench.nn.transformer import Block, init_transformer
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("mae", family="masked-image-modeling", version=1, paper="He et al. 2022", arxiv="2111.06377")
class MAE(SSLMethod):
    """Mean squared error on masked patches, by default normalized within each patch (norm_pix).

    The encoder sees visible patches only; a small decoder sees them and mask tokens. The setting for small data
    reconstructs raw pixels, which gave better neighbors in one short seed; so does lightly's MAE, and such loss values
    are not comparable with normalized ones.

    Args:
        backbone: A ViT.
        mask_ratio: Share of masked patches.
        decoder_width: Width of the decoder's tokens, a multiple of 4 and of its heads.
        decoder_depth: Blocks of the decoder.
        decoder_heads: Attention heads of the decoder.
        normalize_target: Normalize the target within each patch.
    """

    recipes = {
        "small": Recipe(
            views="mae", optimizer="adamw", base_lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=1,
            epochs=8, global_batch_size=64, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="mae", optimizer="adamw", base_lr=2e-4, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=10,
            epochs=1000, global_batch_size=256, source="solo-learn, CIFAR (warm-up ours)",
        ),
        "imagenet": Recipe(
            views="mae", optimizer="adamw", base_lr=1.5e-4, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=40,
            epochs=800, global_batch_size=4096, source="official PRETRAIN.md",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"decoder_width": 64, "decoder_depth": 1, "decoder_heads": 2, "normalize_target": False},
    }
    backbones = ("vit",)
    loss_is_sample_mean = True
    min_global_batch = 1
    backbone: ViT
    decoder_positions: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        mask_ratio: float = 0.75,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        normalize_target: bool = True,
    ) -> None:
        super().__init__(backbone)
        vit = require_vit(backbone, "MAE")
        num_kept(vit.num_patches, mask_ratio)  # refuses a ratio that leaves nothing before training
        if decoder_width % 4 or decoder_width % decoder_heads:
            raise ConfigError(
                f"`decoder_width` must be a multiple of 4 and of decoder_heads, got {decoder_width} with "
                f"{decoder_heads} heads. Change the method's decoder_width or decoder_heads."
            )
        self.mask_ratio = mask_ratio
        self.normalize_target = normalize_target
        self.decoder_embed = nn.Linear(vit.width, decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        self.decoder = nn.Sequential(*(Block(decoder_width, decoder_heads) for _ in range(decoder_depth)))
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        channels = vit.patch_embed.in_channels
        self.decoder_head = nn.Linear(decoder_width, vit.patch_size**2 * channels)
        for part in (self.decoder_embed, self.decoder, self.decoder_head):
            init_transformer(part)
        nn.init.normal_(self.mask_token, std=0.02)
        code = grid_code(decoder_width, vit.grid, vit.grid)
        self.register_buffer("decoder_positions", torch.cat([torch.zeros(1, decoder_width), code]), persistent=False)

    def predict(self, images: Tensor, keep: Tensor) -> Tensor:
        """Decoded patches from the visible ones, (B, C, H, W), (B, K) -> (B, L, V)."""
        visible = self.decoder_embed(self.backbone.forward_tokens(images, keep=keep))  # (B, 1 + K, W)
        tokens = self.mask_token.to(visible.dtype).repeat(len(images), self.backbone.num_patches, 1)
        tokens = tokens.scatter(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]), visible[:, 1:])
        tokens = torch.cat([visible[:, :1], tokens], 1) + self.decoder_positions
        return self.decoder_head(self.decoder_norm(self.decoder(tokens)))[:, 1:]  # type: ignore[no-any-return]

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Error on the masked patches of the one view."""
        images = views[0]
        keep, mask = random_mask(batch.keys("mask"), self.backbone.num_patches, self.mask_ratio)
        target = patchify(images, self.backbone.patch_size)
        if self.normalize_target:
            target = normalize_patches(target)
        return LossOutput(batch_mean(masked_mse(at_least_float32(self.predict(images, keep)), target, mask)))

    @torch.no_grad()
    def reconstruct(self, views: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Input, masked input (masked patches 0) and reconstruction, for pictures, each (B, C, H, W).

        Normalized predictions are scaled back with the true patch's mean and deviation, as the MAE demo does.
        """
        images, vit = views[0], self.backbone
        keep, mask = random_mask(batch.keys("mask"), vit.num_patches, self.mask_ratio)
        patches, prediction = patchify(images, vit.patch_size), self.predict(images, keep)
        if self.normalize_target:
            deviation = (patches.var(-1, keepdim=True) + 1e-6).sqrt()
            prediction = prediction * deviation + patches.mean(-1, keepdim=True)
        hidden = mask[:, :, None].to(images.dtype)
        whole = patches * (1 - hidden) + prediction * hidden
        return (
            images,
            unpatchify(patches * (1 - hidden), vit.patch_size, vit.grid),
            unpatchify(whole, vit.patch_size, vit.grid),
        )
