"""The pre-norm transformer block of ViTs and their decoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm self-attention and MLP, as in ViT and MAE (LayerNorm eps 1e-6, qkv bias, GELU).

    Args:
        width: Token width D, a multiple of `heads`.
        heads: Attention heads.
        mlp_ratio: Width of the MLP's hidden layer over D.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def attend(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The first half: self-attention and its residual."""
        out = F.scaled_dot_product_attention(*self._split(x), attn_mask=None if valid is None else valid[:, None, None])
        y: Tensor = x + self.proj(out.transpose(1, 2).flatten(2))
        return y

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Tokens (B, T, D) -> (B, T, D); those not `valid`, (B, T) bool, are attended by none."""
        x = self.attend(x, valid)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y

    def attention(self, x: Tensor) -> Tensor:
        """Attention weights of this block for its input, (B, T, D) -> (B, heads, T, T)."""
        q, k, _ = self._split(x)
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)


class CrossBlock(nn.Module):
    """A block whose tokens attend to a memory too, between their self-attention and the MLP; all pre-norm.

    Args:
        width: Width D of tokens and memory, a multiple of `heads`.
        heads: Heads of both attentions.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.block = Block(width, heads)
        self.norm_query = nn.LayerNorm(width, eps=1e-6)
        self.norm_memory = nn.LayerNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Tokens (B, T, D), memory (B, M, D) -> (B, T, D)."""
        x = self.block.attend(x)
        q = self.query(self.norm_query(x)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(self.norm_memory(memory)).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.block.mlp(self.block.norm2(x))
        return y


def init_transformer(module: nn.Module) -> None:
    """Xavier-uniform linear layers with zero bias, as the MAE code."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.xavier_uniform_(child.weight)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
