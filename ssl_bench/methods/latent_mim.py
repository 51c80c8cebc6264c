"""Latent MIM: predict the momentum target's latents of masked patches, each told from its image's other patches.

Source: Wei et al. 2024, arXiv 2407.15837; official code yibingwei-1/LatentMIM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, global_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.losses.reconstruction import patchify, unpatchify
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.backbones.vit import ViT, require_vit
from ssl_bench.nn.masking import num_kept, random_mask, true_places
from ssl_bench.nn.positions import grid_code
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.nn.transformer import CrossBlock, init_transformer
from ssl_bench.optim import ParameterGroup, cosine, momentum_schedule
from ssl_bench.random import integers
from ssl_bench.records import Batch, LossOutput, Recipe

SIMILARITY = (0.75, 0.25)  # wanted mean similarity of an image's latents at the start and the end of training


@full_precision
def patch_contrast(prediction: Tensor, target: Tensor, temperature: float) -> Tensor:
    """2 t times the cross entropy of each prediction against its image's targets, (B, n, D) each -> (B,).

    Predictions are standardized within each image and channel over the n >= 2 patches (unbiased deviation + 1e-4);
    then the rows of both have unit norm.
    """
    prediction = (prediction - prediction.mean(1, keepdim=True)) / (prediction.std(1, keepdim=True) + 1e-4)
    logits = unit_rows(prediction) @ unit_rows(target).mT / temperature
    return -2 * temperature * logits.log_softmax(2).diagonal(dim1=1, dim2=2).mean(1)


@full_precision
def mean_similarity(tokens: Tensor) -> Tensor:
    """Mean cosine over all pairs of an image's tokens, each with itself included, (B, n, D) -> (B,)."""
    return unit_rows(tokens).mean(1).square().sum(1)


class Decoder(nn.Module):
    """Latents of masked patches from those of visible ones.

    A query is a learned token plus the mean of the visible patches weighted by the similarity of positions; queries
    attend to each other and to the visible tokens.

    Args:
        vit: The encoder.
        width: Width of the decoder's tokens.
        depth: Number of blocks.
        heads: Heads of each attention.
    """

    positions: Tensor

    def __init__(self, vit: ViT, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(vit.width, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(CrossBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vit.width)
        init_transformer(self)
        nn.init.normal_(self.cls_token, std=0.02)
        self.register_buffer("positions", grid_code(width, vit.grid, vit.grid), persistent=False)

    def forward(self, visible: Tensor, keep: Tensor, masked: Tensor) -> Tensor:
        """Class token and visible tokens (B, 1 + K, D), patch indices (B, K) and (B, n) -> (B, n, D)."""
        known: Tensor = self.embed(visible)
        cls, patches = known[:, :1], known[:, 1:]
        asked, seen = self.positions[masked], self.positions[keep]
        weights = (asked @ seen.mT / asked.shape[2] ** 0.5).softmax(2)
        queries = self.mask_token + weights.to(patches.dtype) @ patches + asked
        x = torch.cat([self.cls_token.to(queries.dtype).expand(len(queries), -1, -1), queries], 1)
        memory = torch.cat([cls, patches + seen], 1)
        for block in self.blocks:
            x = block(x, memory)
        out: Tensor = self.head(self.norm(x[:, 1:]))
        return out


@register_method(
    "latent_mim", family="masked-latent-prediction", version=1, paper="Wei et al. 2024", arxiv="2407.15837"
)
class LatentMIM(SSLMethod):
    """L = patch_contrast(P, T) + w [(a(P) - s)^2 + (a(V) - s)^2], a the mean similarity over the global batch.

    P are predictions and T targets of the masked patches, V the latents of the visible ones; s falls from 0.75 to 0.25
    along a half cosine. Encoder and target end in a head on every token, which is dropped afterwards. The target
    sees the masked patches only. The image is cut into cells with a gap, each patch at an offset of 0 to gap - 1
    pixels in its cell, so that borders of neighbors do not continue each other.

    Departures from the official code: the view is enlarged from the backbone's image size to the size with gaps by
    bicubic interpolation, where the code crops at that size; grid positions are whole numbers, where the code
    stretches them by n / (n - 1); the embedding is the backbone's own, after its final norm, where the code's
    nearest-neighbor test takes the mean token before it. w is that of the official command; the code's default is 0.
    The authors give no setting for images below 224 px.

    Args:
        backbone: A ViT.
        mask_ratio: Share of masked patches; the default leaves 20 of 196.
        gap: Pixels between patches; 4 belong to patches of 16.
        temperature: Temperature of the contrast.
        diversity_weight: w.
        head_dim: Hidden width of the head.
        decoder_width: Width of the decoder's tokens, a multiple of 4 and of its heads.
        decoder_depth: Blocks of the decoder.
        decoder_heads: Attention heads of the decoder.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
    """

    recipes = {
        "small": Recipe(
            views="mae", optimizer="adamw", base_lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=1,
            epochs=8, global_batch_size=64, source="ours, MAE's setting for small data, not tuned",
        ),
        "imagenet": Recipe(
            views="mae", optimizer="adamw", base_lr=1.5e-4, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=40,
            end_lr_factor=0.25, epochs=800, global_batch_size=4096, source="official command",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"gap": 1, "head_dim": 512, "decoder_width": 64, "decoder_depth": 2, "decoder_heads": 4,
                  "target_momentum": 0.9},
        "cifar": {"gap": 1},
    }  # fmt: skip
    backbones = ("vit",)
    min_global_batch = 1
    backbone: ViT
    wanted: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        mask_ratio: float = 0.897,
        gap: int = 4,
        temperature: float = 0.2,
        diversity_weight: float = 0.1,
        head_dim: int = 4096,
        decoder_width: int = 512,
        decoder_depth: int = 3,
        decoder_heads: int = 16,
        target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        vit = require_vit(backbone, "Latent MIM")
        if vit.num_patches - num_kept(vit.num_patches, mask_ratio) < 2:
            raise ConfigError(
                f"`mask_ratio` must mask at least 2 of {vit.num_patches} patches, got {mask_ratio} (method "
                "latent_mim). Raise it or lower the backbone's patch_size."
            )
        if gap < 0:
            raise ConfigError(f"`gap` must be at least 0 pixels, got {gap} (method latent_mim).")
        if decoder_width % 4 or decoder_width % decoder_heads:
            raise ConfigError(
                f"`decoder_width` must be a multiple of 4 and of decoder_heads, got {decoder_width} with "
                f"{decoder_heads} heads (method latent_mim). Change one of them."
            )
        self.mask_ratio = mask_ratio
        self.gap = gap
        self.temperature = temperature
        self.diversity_weight = diversity_weight
        self.target_momentum = target_momentum
        self.head = nn.Sequential(
            nn.Linear(vit.width, head_dim, bias=False), nn.LayerNorm(head_dim), nn.GELU(),
            nn.Linear(head_dim, head_dim, bias=False), nn.LayerNorm(head_dim), nn.GELU(),
            nn.Linear(head_dim, vit.width, bias=False), nn.LayerNorm(vit.width),
        )  # fmt: skip
        init_transformer(self.head)
        self.decoder = Decoder(vit, decoder_width, decoder_depth, decoder_heads)
        self.target = TargetNetwork(self.encoder)
        self.register_buffer("wanted", torch.tensor(SIMILARITY[0]))

    @property
    def encoder(self) -> nn.ModuleList:
        """What the target follows."""
        return nn.ModuleList([self.backbone, self.head])

    def parameter_groups(self) -> list[ParameterGroup]:
        """Patch and decoder embeddings are not decayed, as in the official code."""
        named = self.trainable_parameters()
        return [
            ParameterGroup([item for item in named if "embed" not in item[0]]),
            ParameterGroup([item for item in named if "embed" in item[0]], weight_decay=0.0),
        ]

    def cut_patches(self, images: Tensor, keys: Tensor) -> Tensor:
        """The image of patches cut with gaps, (B, C, H, W) -> (B, C, H, W)."""
        if not self.gap:
            return images
        vit, cell = self.backbone, self.backbone.patch_size + self.gap
        large = F.interpolate(images, [side * cell for side in vit.grid], mode="bicubic")
        cells = patchify(large, cell).unflatten(2, (cell, cell, -1))  # (B, L, cell, cell, C)
        places = torch.arange(vit.patch_size, device=images.device)
        offsets = integers(keys, 2 * vit.num_patches, "gap", self.gap).unflatten(1, (-1, 2, 1)) + places
        rows, columns = offsets[:, :, 0, :, None, None], offsets[:, :, 1, None, :, None]
        cells = cells.gather(2, rows.expand(-1, -1, -1, cell, cells.shape[4]))
        cells = cells.gather(3, columns.expand(-1, -1, vit.patch_size, -1, cells.shape[4]))
        return unpatchify(cells.flatten(2), vit.patch_size, vit.grid)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Contrast and diversity of the one view's patches."""
        keys = batch.keys("mask")
        keep, mask = random_mask(keys, self.backbone.num_patches, self.mask_ratio)
        masked, _ = true_places(mask, mask.shape[1] - keep.shape[1])
        images = self.cut_patches(views[0], keys)
        vit, head = self.target.module.children()
        with torch.no_grad():
            target = head(vit.forward_tokens(images, keep=masked))[:, 1:]  # type: ignore[operator]
        visible = self.head(self.backbone.forward_tokens(images, keep=keep))
        prediction = self.decoder(visible, keep, masked)
        contrast = batch_mean(patch_contrast(prediction, target, self.temperature))
        similarities = [global_mean(mean_similarity(x)) for x in (prediction, visible[:, 1:])]
        diversity = (torch.stack(similarities) - self.wanted).square().sum()
        return LossOutput(
            contrast + self.diversity_weight * diversity,
            contrast=contrast,
            similarity=similarities[0],
            target_similarity=mean_similarity(target).mean(),
        )

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Set s and move the target for the next step."""
        self.wanted.fill_(cosine(*SIMILARITY, step / num_steps))
        self.target.update(self.encoder, momentum_schedule(self.target_momentum, 1.0, step, num_steps))
