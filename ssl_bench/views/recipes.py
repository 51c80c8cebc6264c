"""Named view recipes: which distributions a method's views have, for small and large images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.views.pipeline import ViewPipeline, ViewSpec

SMALL = 96  # images of at most this side follow the CIFAR recipes: no blur


def _kernel(size: int) -> int:
    return max(3, size // 10 | 1)


def _simclr_view(size: int, small: bool, **changes: Any) -> ViewSpec:
    strength = 0.5 if small else 1.0
    spec = ViewSpec(
        size=size,
        jitter_probability=0.8,
        brightness=0.8 * strength,
        contrast=0.8 * strength,
        saturation=0.8 * strength,
        hue=0.2 * strength,
        gray_probability=0.2,
        blur_probability=0.0 if small else 0.5,
        blur_kernel=_kernel(size),
    )
    return dataclasses.replace(spec, **changes)


def _byol_view(size: int, small: bool, second: bool, **changes: Any) -> ViewSpec:
    spec = ViewSpec(
        size=size,
        jitter_probability=0.8,
        brightness=0.4,
        contrast=0.4,
        saturation=0.2,
        hue=0.1,
        gray_probability=0.2,
        blur_probability=0.0 if small else (0.1 if second else 1.0),
        blur_kernel=_kernel(size),
        solarize_probability=0.2 if second else 0.0,
    )
    return dataclasses.replace(spec, **changes)


def simclr(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """Two views of one distribution (Chen et al. 2020); strength 0.5 and no blur on small images."""
    return (_simclr_view(size, small),) * 2


def simclr_asymmetric(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """BYOL's pair (Grill et al. 2020): only the second view is solarized; blur 1.0 and 0.1 on large images."""
    return (_byol_view(size, small, second=False), _byol_view(size, small, second=True))


def vicreg_symmetric(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """Two views of one distribution, each solarized at times (Bardes et al. 2022; crops and blur of solo-learn)."""
    changes: dict[str, Any] = {
        "solarize_probability": 0.1,
        "blur_probability": 0.0 if small else 0.5,
        "crop_scale": (0.2, 1.0),
    }
    return (_byol_view(size, small, second=False, **changes),) * 2


def dino_multicrop(size: int, small: bool, num_local: int = 8, local_size: int | None = None) -> tuple[ViewSpec, ...]:
    """Two global and `num_local` local crops (Caron et al. 2021)."""
    local = local_size or (size // 8 * 4 if small else round(size * 96 / 224))
    shared = {"crop_scale": (0.4, 1.0)}
    views = [_byol_view(size, small, second, **shared) for second in (False, True)]
    views += [
        _byol_view(local, small, False, crop_scale=(0.05, 0.4), blur_probability=0.0 if small else 0.5)
    ] * num_local
    return tuple(views)


def swav_multicrop(size: int, small: bool, num_local: int = 6, local_size: int | None = None) -> tuple[ViewSpec, ...]:
    """Two large and `num_local` small crops of SimCLR's color distribution (Caron et al. 2020)."""
    local = local_size or (size // 8 * 4 if small else round(size * 96 / 224))
    strength = dict.fromkeys(("brightness", "contrast", "saturation"), 0.8) | {"hue": 0.2}
    views = [_simclr_view(size, small, crop_scale=(0.14, 1.0), **strength)] * 2
    views += [_simclr_view(local, small, crop_scale=(0.05, 0.14), **strength)] * num_local
    return tuple(views)


def strong_weak(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """A strong view (MoCo v2's) and a weak one with crop and flip only (ReSSL)."""
    scale = (0.08, 1.0) if small else (0.2, 1.0)
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    return (_simclr_view(size, small, crop_scale=scale, **jitter), ViewSpec(size=size, crop_scale=scale))


def mae(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view with crop and flip only (He et al. 2022)."""
    return (ViewSpec(size=size, crop_scale=(0.08, 1.0) if small else (0.2, 1.0)),)


def supervised(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view: zero-padded crop on small images, random resized crop on large ones; flip."""
    if small:
        return (ViewSpec(size=size, crop_scale=None, pad=max(1, size // 8)),)
    return (ViewSpec(size=size, crop_scale=(0.08, 1.0)),)


def evaluation(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """The image itself; large images are resized to 8/7 of the size and cropped in the center."""
    return (ViewSpec(size=size, crop_scale=None, flip_probability=0.0),)


VIEW_RECIPES: Mapping[str, Callable[..., tuple[ViewSpec, ...]]] = {
    "simclr": simclr,
    "simclr_asymmetric": simclr_asymmetric,
    "vicreg_symmetric": vicreg_symmetric,
    "dino_multicrop": dino_multicrop,
    "swav_multicrop": swav_multicrop,
    "strong_weak": strong_weak,
    "mae": mae,
    "supervised": supervised,
    "eval": evaluation,
}
COUNT_KEYS = ("num_local", "local_size")


def build_views(
    name: str,
    *,
    image_size: int,
    channels: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    overrides: Mapping[str, Any] | None = None,
) -> ViewPipeline:
    """Build a recipe for images of one size.

    Args:
        name: One of `VIEW_RECIPES`.
        image_size: Side of the stored images; views of small images keep it.
        channels: Image channels.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        overrides: Fields of `ViewSpec` to set in every view, and `num_local`, `local_size` of multi-crop.

    Raises:
        ConfigError: If the recipe or an override is unknown, or `num_local` does not apply.
    """
    if name not in VIEW_RECIPES:
        raise ConfigError(f"Unknown view recipe {name!r}.{did_you_mean(name, VIEW_RECIPES)}")
    overrides = dict(overrides or {})
    fields = {field.name for field in dataclasses.fields(ViewSpec)} - {"size"}
    counts = {key: overrides.pop(key) for key in COUNT_KEYS if key in overrides}
    for key in overrides:
        if key not in fields:
            raise ConfigError(f"Unknown view setting {key!r}.{did_you_mean(key, [*fields, *COUNT_KEYS])}")
    if counts and not name.endswith("multicrop"):
        raise ConfigError(f"{', '.join(counts)} apply to multi-crop recipes only, got the recipe {name!r}.")
    specs = VIEW_RECIPES[name](image_size, image_size <= SMALL, **counts)
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in overrides.items()}
    specs = tuple(dataclasses.replace(spec, **changes) for spec in specs)
    return ViewPipeline(name, specs, channels=channels, mean=mean, std=std)
