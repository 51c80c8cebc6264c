"""One vision transformer for every method: whole images, kept tokens, mask tokens, attention maps.

Our own on torch's fused attention rather than timm's: methods need a forward pass over a subset of tokens,
mask tokens before the blocks, attention maps and stretched positions, which timm's class offers only when
its internals are called one by one. timm's models stay available as backbones by name.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.errors import ConfigError
from ssl_bench.nn.backbone import Backbone, register_backbone
from ssl_bench.nn.positions import grid_code
from ssl_bench.nn.transformer import Block, init_transformer


class ViT(Backbone):
    """Pre-norm ViT with a class token and absolute positions, initialized as in the MAE code; no drop path.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels; positions of other sizes are stretched over this grid.
        patch_size: Side of a patch; None for 4 up to 64 px, else 16. Must divide every image size used.
        pool: The embedding: "cls" token or "mean" of the patch tokens, both after the final LayerNorm.
        position_code: "fixed" sine-cosine codes, or "learned" ones, interpolated bicubically for other sizes.
        class_token: Prepend a learned token; without it `pool` must be "mean".
    """

    kind = "vit"
    width: int = 192
    depth: int = 12
    heads: int = 3

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        patch_size: int | None = None,
        pool: Literal["cls", "mean"] = "cls",
        position_code: Literal["fixed", "learned"] = "fixed",
        class_token: bool = True,
    ) -> None:
        super().__init__()
        for key, value, allowed in (
            ("pool", pool, ("cls", "mean")),
            ("position_code", position_code, ("fixed", "learned")),
        ):
            if value not in allowed:
                raise ConfigError(f"The backbone's `{key}` must be one of {', '.join(allowed)}, got {value!r}.")
        if pool == "cls" and not class_token:
            raise ConfigError("The backbone's `pool` must be mean where its class_token is false, got 'cls'.")
        self.patch_size = patch_size or (4 if image_size <= 64 else 16)
        self.check_image_size(image_size)
        self.grid = (image_size // self.patch_size,) * 2
        self.pool = pool
        self.embed_dim = self.width
        self.patch_embed = nn.Conv2d(in_channels, self.width, self.patch_size, self.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.width)) if class_token else None
        self.blocks = nn.ModuleList(Block(self.width, self.heads) for _ in range(self.depth))
        self.norm = nn.LayerNorm(self.width, eps=1e-6)
        init_transformer(self)
        nn.init.xavier_uniform_(self.patch_embed.weight.view(self.width, -1))
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=0.02)
        self.position_embed: nn.Parameter | None = None
        if position_code == "learned":
            self.position_embed = nn.Parameter(torch.empty(1, self.num_patches, self.width).normal_(std=0.02))
        self._codes: dict[tuple[tuple[int, int], torch.device, torch.dtype], Tensor] = {}

    @property
    def num_patches(self) -> int:
        """Patches of an image of the built size."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix(self) -> int:
        """Tokens before the patch tokens: 1 with a class token, else 0."""
        return int(self.cls_token is not None)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of these images."""
        return images.shape[2] // self.patch_size, images.shape[3] // self.patch_size

    def check_image_size(self, image_size: int) -> None:
        """Refuse a size that patches do not tile."""
        if image_size % self.patch_size:
            raise ConfigError(
                f"The image size must be a multiple of the patch size, got {image_size} and {self.patch_size}. Set the "
                "backbone's patch_size, or for multi-crop the view setting local_size."
            )

    def freeze_patch_embedding(self) -> None:
        """Keep the random patch projection fixed (MoCo v3)."""
        self.patch_embed.requires_grad_(False)

    def drop_class_token(self) -> None:
        """Remove the class token for good, and pool the patch tokens (I-JEPA)."""
        self.cls_token, self.pool = None, "mean"
        self.arguments |= {"class_token": False, "pool": "mean"}

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Position codes of a grid of patches, (L, D), in the precision of the weights (also under autocast)."""
        if self.position_embed is not None:
            if grid == self.grid:
                return self.position_embed[0]
            table = self.position_embed.mT.unflatten(2, self.grid)
            return F.interpolate(table, grid, mode="bicubic", antialias=True).flatten(2)[0].T
        like = self.norm.weight
        key = (grid, like.device, like.dtype)
        if key not in self._codes:
            self._codes[key] = grid_code(self.width, grid, self.grid).to(like.device, like.dtype)
        return self._codes[key]

    def patch_tokens(self, images: Tensor) -> Tensor:
        """Patch embeddings without positions, (B, C, H, W) -> (B, L, D), row-major."""
        for side in images.shape[2:]:
            self.check_image_size(side)
        return self.patch_embed(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]

    def assemble(self, tokens: Tensor, grid: tuple[int, int], keep: Tensor | None = None) -> Tensor:
        """Input of the first block: class token, then the kept patch tokens with positions, (B, 1 + K, D).

        Without a class token, K replaces 1 + K here and below.

        Args:
            tokens: Patch tokens of the whole grid, (B, L, D).
            grid: Rows and columns of patches.
            keep: Patch indices to keep, (B, K) int64; None keeps all.
        """
        tokens = tokens + self.positions(grid)
        if keep is not None:
            tokens = tokens.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))
        if self.cls_token is None:
            return tokens
        cls = self.cls_token.to(tokens.dtype).expand(len(tokens), -1, -1)  # learned, so it needs no position
        return torch.cat([cls, tokens], 1)

    def prepare(
        self,
        images: Tensor,
        *,
        keep: Tensor | None = None,
        mask: Tensor | None = None,
        mask_token: Tensor | None = None,
    ) -> Tensor:
        """Input of the first block from images, (B, C, H, W) -> (B, 1 + K, D).

        Args:
            images: (B, C, H, W).
            keep: Patch indices to keep, (B, K) int64; None keeps all.
            mask: Patches replaced by `mask_token` before positions are added, (B, L) bool.
            mask_token: (1, 1, D) or (D,).
        """
        tokens = self.patch_tokens(images)
        if mask is not None:
            assert mask_token is not None
            share = mask[:, :, None].to(tokens.dtype)
            tokens = tokens * (1 - share) + mask_token.to(tokens.dtype) * share
        return self.assemble(tokens, self.grid_of(images), keep)

    def encode(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """All blocks and the final norm on what `prepare` or `assemble` gave, (B, T, D) -> (B, T, D).

        Args:
            x: Tokens, (B, T, D).
            valid: Tokens that others may attend to, (B, T) bool, where images keep different numbers; None for all.
        """
        for block in self.blocks:
            x = block(x, valid)
        normed: Tensor = self.norm(x)
        return normed

    def forward_tokens(
        self,
        images: Tensor,
        *,
        keep: Tensor | None = None,
        mask: Tensor | None = None,
        mask_token: Tensor | None = None,
    ) -> Tensor:
        """Class token and patch tokens after the final norm, (B, 1 + K, D); arguments as `prepare`."""
        return self.encode(self.prepare(images, keep=keep, mask=mask, mask_token=mask_token))

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Attention weights of every block, each (B, heads, 1 + L, 1 + L)."""
        x = self.prepare(images)
        maps = []
        for block in self.blocks:
            assert isinstance(block, Block)
            maps.append(block.attention(x))
            x = block(x)
        return maps

    def pooled(self, tokens: Tensor) -> Tensor:
        """The embedding of `forward_tokens`' output, (B, 1 + K, D) -> (B, D)."""
        return tokens[:, 0] if self.pool == "cls" else tokens[:, self.num_prefix :].mean(1)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings, (B, C, H, W) -> (B, D)."""
        return self.pooled(self.forward_tokens(images))

    def feature_map(self, images: Tensor) -> Tensor:
        """Patch tokens as a map, (B, C, H, W) -> (B, D, h, w)."""
        feature_map: Tensor = self.forward_tokens(images)[:, self.num_prefix :].mT.unflatten(2, self.grid_of(images))
        return feature_map


def require_vit(backbone: Backbone, method: str, *, class_token: bool = True) -> ViT:
    """The backbone, if it is one of this package's ViTs.

    Args:
        backbone: The study's backbone.
        method: Name of the method that works on patch tokens, for the message.
        class_token: The method needs the class token.

    Raises:
        ConfigError: If it is another network, or lacks a needed class token.
    """
    if not isinstance(backbone, ViT):
        raise ConfigError(
            f"{method} works on patch tokens, which only this package's ViTs give, got {backbone.name!r}. Choose "
            "vit_micro, vit_tiny, vit_small or vit_base as this method's backbone in the study."
        )
    if class_token and backbone.cls_token is None:
        raise ConfigError(
            f"{method} needs a class token, got a backbone without. Set the backbone's class_token to true."
        )
    return backbone


@register_backbone("vit_micro", version=1)
class ViTMicro(ViT):
    """A ViT for CPU-sized studies: width 96, 4 blocks, 3 heads, patch 4 on small images."""

    width, depth, heads = 96, 4, 3


@register_backbone("vit_tiny", version=1)
class ViTTiny(ViT):
    """ViT-Tiny: width 192, 12 blocks, 3 heads; patch 4 up to 64 px, else 16."""

    width, depth, heads = 192, 12, 3


@register_backbone("vit_small", version=1)
class ViTSmall(ViT):
    """ViT-Small: width 384, 12 blocks, 6 heads; patch 4 up to 64 px, else 16."""

    width, depth, heads = 384, 12, 6


@register_backbone("vit_base", version=1)
class ViTBase(ViT):
    """ViT-Base: width 768, 12 blocks, 12 heads; patch 4 up to 64 px, else 16."""

    width, depth, heads = 768, 12, 12
