"""A vision transformer in numpy loops: the oracle of methods on patch tokens. It shares no code with the package."""

from __future__ import annotations

import math

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


def block(tokens: list[np.ndarray], state: dict[str, np.ndarray], prefix: str, heads: int) -> list[np.ndarray]:
    def parameters(name: str) -> tuple[np.ndarray, np.ndarray]:
        return state[f"{prefix}.{name}.weight"], state[f"{prefix}.{name}.bias"]

    width = len(tokens[0])
    size = width // heads
    weight, bias = parameters("qkv")
    qkv = [weight @ layer_norm(x, *parameters("norm1")) + bias for x in tokens]
    out = []
    for i, x in enumerate(tokens):
        mixed = np.zeros(width)
        for h in range(heads):
            q = qkv[i][h * size : (h + 1) * size]
            keys = [v[width + h * size : width + (h + 1) * size] for v in qkv]
            values = [v[2 * width + h * size : 2 * width + (h + 1) * size] for v in qkv]
            shares = np.array([math.exp(q @ k / math.sqrt(size)) for k in keys])
            shares /= shares.sum()
            mixed[h * size : (h + 1) * size] = sum(s * v for s, v in zip(shares, values, strict=True))
        weight, bias = parameters("proj")
        y = x + weight @ mixed + bias
        (w1, b1), (w2, b2) = parameters("mlp.0"), parameters("mlp.2")
        out.append(y + w2 @ gelu(w1 @ layer_norm(y, *parameters("norm2")) + b1) + b2)
    return out


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
