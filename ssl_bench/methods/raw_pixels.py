"""The images themselves: what every learned embedding should beat."""

from __future__ import annotations

from ssl_bench.methods.base import SSLMethod, register_method


@register_method("raw_pixels", family="baseline", version=1)
class RawPixels(SSLMethod):
    """Normalized pixels as the embedding; nothing is trained, so one seed tells all.

    Args:
        backbone: The pixels backbone.
    """

    backbones = ("pixels",)
    trainable = False
    fixed_backbone = "pixels"
