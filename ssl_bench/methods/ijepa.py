"""I-JEPA: predict the momentum target's tokens of four blocks from a context block without them.

Source: Assran et al. 2023, arXiv 2301.08243; official code facebookresearch/ijepa.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.backbones.vit import ViT, require_vit
from ssl_bench.nn.masking import block_sizes, multi_block_masks, true_places
from ssl_bench.nn.positions import grid_code
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.nn.transformer import Block
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def block_loss(prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean smooth L1 error (beta 1) over the valid tokens of each image, (B, M, T, D), the same, (B, M, T) -> (B,)."""
    error = F.smooth_l1_loss(prediction, target, reduction="none").mean(-1)
    return (error * valid).flatten(1).sum(1) / valid.flatten(1).sum(1)


class Predictor(nn.Module):
    """Tokens of target blocks from those of the context: narrow transformer, queries of one learned token.

    Args:
        vit: The encoder; the predictor has its heads and returns its width.
        width: Width of the predictor's tokens.
        depth: Number of blocks.
    """

    positions: Tensor

    def __init__(self, vit: ViT, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(vit.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, vit.heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vit.width)
        self.register_buffer("positions", grid_code(width, vit.grid, vit.grid), persistent=False)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for k, block in enumerate(self.blocks, 1):
                assert isinstance(block, Block)
                for layer in (block.proj, block.mlp[2]):
                    layer.get_parameter("weight").div_(math.sqrt(2 * k))

    def forward(self, context: Tensor, places: Tensor, valid: Tensor, targets: Tensor, targets_valid: Tensor) -> Tensor:
        """Predictions of each block alone, (B, M, T, D).

        Args:
            context: Context tokens, (B, K, D).
            places: Their patch indices, (B, K).
            valid: False where they are padding, (B, K).
            targets: Patch indices of the target blocks, (B, M, T).
            targets_valid: False where those are padding, (B, M, T).
        """
        num = targets.shape[1]
        known: Tensor = self.embed(context) + self.positions[places]
        queries = self.mask_token + self.positions[targets.flatten(0, 1)]
        x = torch.cat([known.repeat_interleave(num, 0), queries.to(known.dtype)], 1)
        allowed = torch.cat([valid.repeat_interleave(num, 0), targets_valid.flatten(0, 1)], 1)
        for block in self.blocks:
            x = block(x, allowed)
        out: Tensor = self.head(self.norm(x[:, context.shape[1] :])).unflatten(0, (-1, num))
        return out


@register_method("ijepa", family="masked-latent-prediction", version=1, paper="Assran et al. 2023", arxiv="2301.08243")
class IJEPA(SSLMethod):
    """L = mean smooth L1 between predicted tokens and LN(target encoder's tokens), LN without affine map.

    The target encoder sees the whole image, the context encoder the context block without the targets. Neither has a
    class token: the method removes the backbone's, and the target encoder with mean pooling is evaluated. Its weight
    on old values rises linearly to 1, as in the code, where a step uses the value at the steps done before it.

    Departures from the official code: block sizes are drawn for each image instead of each batch, and tokens are
    padded and left out of the attention instead of cut to the smallest number in the batch, so that an image's masks
    do not depend on its batch; blocks may touch the last row and column and span the grid, which the code excludes
    and small grids cannot spare; where too little context is left, all blocks are drawn anew, while the code lets the
    context overlap a target after 20 failures; the code's least number of patches holds for the context only. The
    encoder keeps this package's initialization. The authors give no setting for small images.

    Args:
        backbone: A ViT.
        num_targets: Target blocks an image.
        target_scale: Range of a target block's share of the patches.
        target_aspect: Range of its height over its width.
        context_scale: Range of the square context block's share of the patches, before targets are removed.
        min_context: Fewest patches of context.
        predictor_width: Width of the predictor's tokens, a multiple of 4 and of the backbone's heads.
        predictor_depth: Blocks of the predictor; the official one has 12 behind a ViT-L or ViT-H.
        target_momentum: EMA weight at the start.
    """

    recipes = {
        "small": Recipe(
            views="ijepa", optimizer="adamw", base_lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95), warmup_epochs=1,
            epochs=8, global_batch_size=64, source="ours, MAE's setting for small data, not tuned",
        ),
        "imagenet": Recipe(
            views="ijepa", optimizer="adamw", base_lr=1.25e-4, weight_decay=0.04, end_weight_decay=0.4,
            warmup_epochs=40, warmup_start_lr=2e-4, end_lr_factor=1e-3, epochs=300, global_batch_size=2048,
            source="official configuration, ViT-H/14",
        ),
    }  # fmt: skip
    arguments = {"small": {"predictor_width": 48, "predictor_depth": 2, "target_momentum": 0.9}}
    backbones = ("vit",)
    loss_is_sample_mean = True
    min_global_batch = 1
    backbone: ViT

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_targets: int = 4,
        target_scale: tuple[float, float] = (0.15, 0.2),
        target_aspect: tuple[float, float] = (0.75, 1.5),
        context_scale: tuple[float, float] = (0.85, 1.0),
        min_context: int = 11,
        predictor_width: int = 384,
        predictor_depth: int = 6,
        target_momentum: float = 0.996,
    ) -> None:
        super().__init__(backbone)
        vit = require_vit(backbone, "I-JEPA", class_token=False)
        vit.drop_class_token()
        if predictor_width % 4 or predictor_width % vit.heads:
            raise ConfigError(
                f"`predictor_width` must be a multiple of 4 and of the backbone's {vit.heads} heads, got "
                f"{predictor_width} (method ijepa). Change the method's predictor_width."
            )
        for key, (low, high), limit in (
            ("target_scale", target_scale, 1.0),
            ("context_scale", context_scale, 1.0),
            ("target_aspect", target_aspect, math.inf),
        ):
            if not 0 < low <= high <= limit:
                raise ConfigError(f"`{key}` must be a range in (0, {limit}], got {[low, high]} (method ijepa).")
        with torch.device("cpu"):  # numbers to decide on, also where the method is built without memory
            rows, columns = block_sizes(torch.linspace(0, 1, 1001), vit.grid, target_scale, target_aspect)
        smallest, largest = int((rows * columns).min()), int((rows * columns).max())
        if not 1 <= num_targets <= vit.num_patches // largest:
            raise ConfigError(
                f"`num_targets` blocks of up to {largest} patches must leave context in a grid of {vit.num_patches}, "
                f"got {num_targets} (method ijepa). Change it, target_scale or the backbone's patch_size."
            )
        if not 1 <= min_context <= vit.num_patches - smallest:
            raise ConfigError(
                f"`min_context` must be in [1, {vit.num_patches - smallest}], got {min_context} (method ijepa). Change "
                "it or the backbone's patch_size."
            )
        self.num_targets = num_targets
        self.target_scale = target_scale
        self.target_aspect = target_aspect
        self.context_scale = context_scale
        self.min_context = min_context
        self.target_momentum = target_momentum
        self.predictor = Predictor(vit, predictor_width, predictor_depth)
        self.target = TargetNetwork(vit)

    @property
    def evaluation_backbone(self) -> Backbone:
        """The target encoder."""
        encoder = self.target.module
        assert isinstance(encoder, ViT)
        return encoder

    def masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Context, (B, L) bool, and target blocks, (B, M, L) bool."""
        return multi_block_masks(
            batch.keys("mask"), self.backbone.grid, num_targets=self.num_targets, target_scale=self.target_scale,
            target_aspect=self.target_aspect, context_scale=self.context_scale, min_context=self.min_context,
        )  # fmt: skip

    @torch.no_grad()
    def target_tokens(self, images: Tensor) -> Tensor:
        """Normalized tokens of the target encoder, (B, L, D)."""
        encoder = self.target.module
        assert isinstance(encoder, ViT)
        tokens = encoder.forward_tokens(images)
        return F.layer_norm(tokens, tokens.shape[-1:])

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Mean over images of the error on their target blocks."""
        images = views[0]
        context, targets = self.masks(batch)
        longest = torch.stack([context.sum(-1).max(), targets.sum(-1).max()]).tolist()  # the step's one wait
        places, valid = true_places(context, longest[0])
        target_places, target_valid = true_places(targets, longest[1])
        known = self.backbone.encode(self.backbone.prepare(images, keep=places), valid)
        prediction = self.predictor(known, places, valid, target_places, target_valid)
        tokens = self.target_tokens(images)
        target = tokens[torch.arange(len(images), device=images.device)[:, None, None], target_places]
        std = tokens.flatten(0, 1).std(0, unbiased=False).mean()
        return LossOutput(batch_mean(block_loss(prediction, target, target_valid)), target_std=std)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the target."""
        share = (step - 1) / num_steps
        self.target.update(self.backbone, self.target_momentum + share * (1 - self.target_momentum))
