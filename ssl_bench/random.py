"""Counter-based random numbers: every draw is a function of (seed, epoch, sample index, draw name).

No generator state exists, so a draw does not depend on world size, worker count, device, batch
composition or on what was drawn before it. 64-bit integer hashing (the SplitMix64 finalizer of Steele
et al. 2014) gives bitwise equal results on every device, since integer arithmetic wraps identically.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it logical
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


@lru_cache(maxsize=4096)
def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def derive_seed(*parts: int | str) -> int:
    """Fold integers and names into one seed in [0, 2**63); order matters."""
    value = 0
    for part in parts:
        value = _mix_int(value ^ (_name_hash(part) if isinstance(part, str) else part & _MASK))
    return value >> 1


def sample_keys(seed: int, epoch: int, index: Tensor, stream: str) -> Tensor:
    """One 64-bit key a sample.

    Args:
        seed: Seed of the run.
        epoch: Epoch number, from 0.
        index: Sample indices in the dataset, shape (B,), int64; the keys are on its device.
        stream: Names what the key is for, such as "view0" or "mask".

    Returns:
        Keys, shape (B,), int64.
    """
    base = derive_seed(seed, epoch, stream)
    return _mix(index.to(torch.int64) ^ _signed(base))


def _bits(keys: Tensor, num: int, draw: str) -> Tensor:
    counters = torch.arange(num, device=keys.device, dtype=torch.int64)
    return _mix(_mix(keys ^ _signed(_name_hash(draw)))[:, None] + counters * _signed(_GOLDEN))


def uniform(keys: Tensor, num: int, draw: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), `num` a key, shape (B, num).

    Draws under another name, or at another position, are independent. float32 numbers have 24
    random bits, float64 numbers 53.
    """
    bits = 53 if dtype == torch.float64 else 24
    return _shift_right(_bits(keys, num, draw), 64 - bits).to(dtype) * 2.0**-bits


def normal(keys: Tensor, num: int, draw: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, `num` a key, shape (B, num) (Box-Muller)."""
    u = uniform(keys, num, draw + "/radius", torch.float64)
    v = uniform(keys, num, draw + "/angle", torch.float64)
    return (torch.sqrt(-2.0 * torch.log1p(-u)) * torch.cos(2.0 * math.pi * v)).to(dtype)


def integers(keys: Tensor, num: int, draw: str, high: int) -> Tensor:
    """Integers in [0, high), `num` a key, shape (B, num), int64 (bias below high / 2**53)."""
    return (uniform(keys, num, draw, torch.float64) * high).to(torch.int64)


def permutation(keys: Tensor, num: int, draw: str) -> Tensor:
    """A permutation of range(num) for each key, shape (B, num), int64."""
    return uniform(keys, num, draw, torch.float64).argsort(dim=1)


def epoch_permutation(seed: int, epoch: int, num: int) -> Tensor:
    """The order in which the samples of one epoch are visited, shape (num,), int64, on the CPU."""
    keys = torch.tensor([_signed(derive_seed(seed, epoch, "order"))])
    return permutation(keys, num, "order")[0]
