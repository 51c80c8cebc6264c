"""A vision transformer in numpy loops: the oracle of methods on patch tokens. It shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def code_1d(position: int, width: int) -> list[float]:
    omegas = [10000 ** (-i / (width / 2)) for i in range(width // 2)]
    return [math.sin(position * w) for w in omegas] + [math.cos(position * w) for w in omegas]


def code_2d(row: int, column: int, width: int) -> np.ndarray:
    return np.array(code_1d(column, width // 2) + code_1d(row, width // 2))


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return (x - mean) / math.sqrt(variance + 1e-6) * weight + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def attention(
    queries: Sequence[np.ndarray], keys: Sequence[np.ndarray], values: Sequence[np.ndarray], heads: int
) -> list[np.ndarray]:
    """Values mixed by softmax(q . k / sqrt(width of a head)), head by head."""
    size = len(queries[0]) // heads
    out = []
    for query in queries:
        mixed = np.zeros(len(query))
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            shares = np.array([math.exp(query[own] @ key[own] / math.sqrt(size)) for key in keys])
            shares /= shares.sum()
            mixed[own] = sum(s * v[own] for s, v in zip(shares, values, strict=True))
        out.append(mixed)
    return out


def mlp(x: np.ndarray, state: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    """The second half of a pre-norm block."""
    normed = layer_norm(x, state[f"{prefix}.norm2.weight"], state[f"{prefix}.norm2.bias"])
    hidden = gelu(state[f"{prefix}.mlp.0.weight"] @ normed + state[f"{prefix}.mlp.0.bias"])
    return x + state[f"{prefix}.mlp.2.weight"] @ hidden + state[f"{prefix}.mlp.2.bias"]


def block(tokens: list[np.ndarray], state: dict[str, np.ndarray], prefix: str, heads: int) -> list[np.ndarray]:
    """Pre-norm self-attention and MLP."""
    weight, bias = state[f"{prefix}.qkv.weight"], state[f"{prefix}.qkv.bias"]
    norm = state[f"{prefix}.norm1.weight"], state[f"{prefix}.norm1.bias"]
    qkv = [np.split(weight @ layer_norm(x, *norm) + bias, 3) for x in tokens]
    weight, bias = state[f"{prefix}.proj.weight"], state[f"{prefix}.proj.bias"]
    mixed = attention(*zip(*qkv, strict=True), heads=heads)
    return [mlp(x + weight @ m + bias, state, prefix) for x, m in zip(tokens, mixed, strict=True)]


def patches_of(image: np.ndarray, size: int) -> list[np.ndarray]:
    """Pixels of each patch in row-major order, each (C, size, size)."""
    rows, columns = (side // size for side in image.shape[1:])
    return [image[:, size * r : size * (r + 1), size * c : size * (c + 1)] for r in range(rows) for c in range(columns)]


def embed_patches(image: np.ndarray, state: dict[str, np.ndarray], prefix: str, size: int) -> list[np.ndarray]:
    """Patch embeddings without positions."""
    kernel, bias = state[f"{prefix}.patch_embed.weight"], state[f"{prefix}.patch_embed.bias"]
    return [np.array([(k * patch).sum() for k in kernel]) + bias for patch in patches_of(image, size)]


def encode(tokens: list[np.ndarray], state: dict[str, np.ndarray], prefix: str, heads: int) -> list[np.ndarray]:
    """All blocks of a ViT and its final norm."""
    depth = len({key.split(".blocks.")[1].split(".")[0] for key in state if key.startswith(f"{prefix}.blocks.")})
    for b in range(depth):
        tokens = block(tokens, state, f"{prefix}.blocks.{b}", heads)
    return [layer_norm(x, state[f"{prefix}.norm.weight"], state[f"{prefix}.norm.bias"]) for x in tokens]


def state_of(module: object) -> dict[str, np.ndarray]:
    """The module's state as arrays."""
    return {key: value.detach().numpy() for key, value in module.state_dict().items()}  # type: ignore[attr-defined]
