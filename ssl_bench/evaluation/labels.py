"""Label subsets for semi-supervised evaluation: the same images for everyone.

A subset is a pure function of (dataset fingerprint, split, seed, fraction) in integer arithmetic, so
machines, ranks and library versions agree; smaller fractions are contained in larger ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.random import derive_seed, epoch_permutation


def label_subset(labels: Tensor, fraction: float, *, fingerprint: str, split: str, seed: int) -> Tensor:
    """Sorted indices of a stratified share of a split.

    Each class keeps fraction * size images, rounded half up, and at least one if it has any.

    Args:
        labels: Classes, (M,).
        fraction: Share in (0, 1].
        fingerprint: The dataset's content hash.
        split: Name of the split.
        seed: Another seed gives another subset.

    Raises:
        ConfigError: If the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"A label fraction must be in (0, 1], got {fraction} (protocol finetune, label_fractions).")
    kept = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        # the small term undoes binary rounding of products such as 0.35 * 10
        count = max(1, math.floor(fraction * len(members) + 0.5 + 1e-9))
        order = epoch_permutation(derive_seed(seed, fingerprint, split, label), 0, len(members))
        kept.append(members[order[:count]])
    return torch.cat(kept).sort().values if kept else labels.new_empty(0)
