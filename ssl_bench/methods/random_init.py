"""The untrained backbone: what an architecture gives for nothing."""

from __future__ import annotations

from ssl_bench.methods.base import SSLMethod, register_method


@register_method("random_init", family="baseline", version=1)
class RandomInit(SSLMethod):
    """The backbone as initialized; nothing is trained.

    Args:
        backbone: The network to evaluate.
    """

    trainable = False
