"""Named view recipes: which distributions a method's views have, for small and large images."""

from __future__ import annotations

import dataclasses
import inspect
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


def simclr_three(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """Three views of SimCLR's distribution (TriBYOL)."""
    return (_simclr_view(size, small),) * 3


def simclr_and_image(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """Two views of SimCLR's distribution and the image itself (MV-MR)."""
    return simclr(size, small) + evaluation(size, small)


def care(size: int, small: bool, shared_by: int | None = None) -> tuple[ViewSpec, ...]:
    """Two views with MoCo v2's colors, and two more whose draws are shared by runs of images (Gupta et al. 2024).

    Runs have 16 images, or 8 where images are large; there the shared views are not cropped at random.
    """
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    view = _simclr_view(size, small, crop_scale=(0.08, 1.0) if small else (0.2, 1.0), **jitter)
    shared = dataclasses.replace(
        view, shared_by=shared_by or (16 if small else 8), crop_scale=view.crop_scale if small else None
    )
    return view, view, shared, shared


def strong_multiview(size: int, small: bool, num_views: int = 4) -> tuple[ViewSpec, ...]:
    """`num_views` views with SimCLR's full color strength and no blur (Patacchiola & Storkey 2020)."""
    strength = dict.fromkeys(("brightness", "contrast", "saturation"), 0.8) | {"hue": 0.2}
    return (_simclr_view(size, small, blur_probability=0.0, **strength),) * num_views


def ssole(size: int, small: bool, num_views: int = 4) -> tuple[ViewSpec, ...]:
    """`num_views` views with SimCLR's full color strength, each solarized at times (Huang et al. 2025)."""
    strength = dict.fromkeys(("brightness", "contrast", "saturation"), 0.8) | {"hue": 0.2}
    return (_simclr_view(size, small, crop_scale=(0.14, 1.0), solarize_probability=0.2, **strength),) * num_views


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


def _local_size(size: int, small: bool) -> int:
    return max(4, size // 8 * 4) if small else round(size * 96 / 224)  # a multiple of a small ViT's patch


def dino_multicrop(
    size: int,
    small: bool,
    num_local: int = 8,
    local_size: int | None = None,
    local_crop_scale: tuple[float, float] = (0.05, 0.4),
) -> tuple[ViewSpec, ...]:
    """Two global and `num_local` local crops (Caron et al. 2021)."""
    local = _local_size(size, small) if local_size is None else local_size
    views = [_byol_view(size, small, second, crop_scale=(0.4, 1.0)) for second in (False, True)]
    blur = 0.0 if small else 0.5
    views += [_byol_view(local, small, False, crop_scale=local_crop_scale, blur_probability=blur)] * num_local
    return tuple(views)


def swav_multicrop(
    size: int,
    small: bool,
    num_local: int = 6,
    local_size: int | None = None,
    local_crop_scale: tuple[float, float] = (0.05, 0.14),
) -> tuple[ViewSpec, ...]:
    """Two large and `num_local` small crops of SimCLR's color distribution (Caron et al. 2020)."""
    local = _local_size(size, small) if local_size is None else local_size
    strength = dict.fromkeys(("brightness", "contrast", "saturation"), 0.8) | {"hue": 0.2}
    views = [_simclr_view(size, small, crop_scale=(0.14, 1.0), **strength)] * 2
    views += [_simclr_view(local, small, crop_scale=local_crop_scale, **strength)] * num_local
    return tuple(views)


def strong_weak(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """A strong view (MoCo v2's) and a weak one with crop and flip only (ReSSL)."""
    scale = (0.08, 1.0) if small else (0.2, 1.0)
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    return (_simclr_view(size, small, crop_scale=scale, **jitter), ViewSpec(size=size, crop_scale=scale))


def mae(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view with crop and flip only (He et al. 2022)."""
    return (ViewSpec(size=size, crop_scale=(0.08, 1.0) if small else (0.2, 1.0)),)


def simmim(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view with a mild crop and flip (Xie et al. 2022)."""
    return (ViewSpec(size=size, crop_scale=(0.67, 1.0)),)


def ijepa(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view with crop only (Assran et al. 2023)."""
    return (ViewSpec(size=size, crop_scale=(0.3, 1.0), flip_probability=0.0),)


def diet(size: int, small: bool) -> tuple[ViewSpec, ...]:
    """One view with rare jitter, and rare blur on large images (a public script of DIET; without its erasing)."""
    jitter = {"jitter_probability": 0.3, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}
    return (_simclr_view(size, small, blur_probability=0.0 if small else 0.2, **jitter),)


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
    "simclr_three": simclr_three,
    "simclr_and_image": simclr_and_image,
    "care": care,
    "strong_multiview": strong_multiview,
    "ssole": ssole,
    "simclr_asymmetric": simclr_asymmetric,
    "vicreg_symmetric": vicreg_symmetric,
    "dino_multicrop": dino_multicrop,
    "swav_multicrop": swav_multicrop,
    "strong_weak": strong_weak,
    "mae": mae,
    "simmim": simmim,
    "ijepa": ijepa,
    "diet": diet,
    "supervised": supervised,
    "eval": evaluation,
}
SMALLEST = {"num_local": 0, "num_views": 2, "shared_by": 2}  # settings that count


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
        overrides: Fields of `ViewSpec` to set in every view. Multi-crop recipes also take `num_local`,
            `local_size` and `local_crop_scale`; there `crop_scale` is that of the two global views.
            "strong_multiview" and "ssole" also take `num_views`, "care" `shared_by` for its last two views.

    Raises:
        ConfigError: If the recipe or an override is unknown or has no meaning there.
    """
    if name not in VIEW_RECIPES:
        raise ConfigError(f"Unknown view recipe {name!r}.{did_you_mean(name, VIEW_RECIPES)}")
    multicrop = name.endswith("multicrop")
    fields = {field.name for field in dataclasses.fields(ViewSpec)} - {"size", "shared_by"}
    own_keys = set(inspect.signature(VIEW_RECIPES[name]).parameters) - {"size", "small"}
    valid = fields | own_keys
    changes: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (overrides or {}).items()
    }
    for key in changes:
        if key not in valid:
            raise ConfigError(f"Unknown setting {key!r} of the view recipe {name!r}.{did_you_mean(key, valid)}")
    for key, smallest in SMALLEST.items():
        number = changes.get(key, smallest)
        if not isinstance(number, int) or number < smallest:
            raise ConfigError(
                f"`{key}` must be a whole number of at least {smallest}, got {number!r} in the study's views."
            )
    own = {key: changes.pop(key) for key in own_keys if key in changes}
    try:
        specs = VIEW_RECIPES[name](image_size, image_size <= SMALL, **own)
        local_changes = {key: value for key, value in changes.items() if key != "crop_scale"}
        specs = tuple(
            dataclasses.replace(spec, **(local_changes if multicrop and v > 1 else changes))
            for v, spec in enumerate(specs)
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"View settings must be numbers, pairs of numbers for ranges, got {dict(overrides or {})!r} for the "
            f"recipe {name!r} ({error}). Correct the study's views."
        ) from error
    return ViewPipeline(name, specs, channels=channels, mean=tuple(mean), std=tuple(std))
