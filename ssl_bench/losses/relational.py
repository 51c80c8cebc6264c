"""Losses on how a sample relates to a set of references.

Shapes: B samples, K references, P projection width.
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
def relational_cross_entropy(
    query: Tensor, key: Tensor, references: Tensor, *, query_temperature: float, key_temperature: float
) -> Tensor:
    """Cross entropy from the key's distribution over the references to the query's.

    -sum_m P_m log S_m with P = softmax(key . Q / t_key), S = softmax(query . Q / t_query); the key itself is
    no reference. Source: Zheng et al. 2021, eqs. 4-6, arXiv 2107.09282; equal to the official code.

    Args:
        query: Unit rows with gradient, shape (B, P).
        key: Unit rows without gradient, shape (B, P).
        references: Unit rows without gradient, shape (K, P).
        query_temperature: Temperature of the query's distribution.
        key_temperature: Temperature of the key's distribution, lower than the query's.

    Returns:
        One value a sample, shape (B,).
    """
    target = (key @ references.T / key_temperature).softmax(1)
    return -(target * (query @ references.T / query_temperature).log_softmax(1)).sum(1)
