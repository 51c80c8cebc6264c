"""From stored bytes to normalized random views, on the device of the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode

from ssl_bench.random import sample_keys
from ssl_bench.records import Batch
from ssl_bench.views import operations as ops
from ssl_bench.views import parameters as draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """The distribution of one view. Probabilities and strengths of 0 leave an operation out.

    `crop_scale` None takes the whole image (resized to `size` if need be); `pad` instead crops `size` pixels
    out of the image padded with zeros. The colour jitter's order is random for each sample.
    """

    size: int
    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 0
    interpolation: str = "bicubic"
    flip_probability: float = 0.5
    jitter_probability: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    gray_probability: float = 0.0
    blur_probability: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: int = 23
    solarize_probability: float = 0.0
    solarize_threshold: float = 0.5


class ViewPipeline:
    """Makes the views of a batch; each is a function of (seed, epoch, sample index, view) alone.

    Args:
        name: Name of the recipe.
        specs: One distribution a view.
        channels: Image channels; operations on color are left out for one channel.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    chunk = 256  # samples handled at once: keeps the working set of small images in cache

    def __init__(
        self, name: str, specs: tuple[ViewSpec, ...], *, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self.name = name
        self.channels = channels
        self.skipped: tuple[str, ...] = ()
        if channels == 1:
            if any(spec.saturation or spec.hue or spec.gray_probability for spec in specs):
                self.skipped = ("saturation", "hue", "grayscale")
            specs = tuple(dataclasses.replace(spec, saturation=0.0, hue=0.0, gray_probability=0.0) for spec in specs)
        self.specs = specs
        self.mean = mean
        self.std = std

    @property
    def num_views(self) -> int:
        """Number of views."""
        return len(self.specs)

    @property
    def view_sizes(self) -> tuple[int, ...]:
        """Side of each view in pixels."""
        return tuple(spec.size for spec in self.specs)

    def describe(self) -> dict[str, Any]:
        """Everything that decides the views, and what was left out for one-channel images."""
        return {
            "name": self.name,
            "specs": [dataclasses.asdict(spec) for spec in self.specs],
            "mean": list(self.mean),
            "std": list(self.std),
            "skipped": list(self.skipped),
        }

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """Fill in `batch.views`: float32, normalized, one (B, C, size, size) a view."""
        views = []
        for v, spec in enumerate(self.specs):
            images = batch.images[v] if isinstance(batch.images, tuple) else batch.images
            keys = sample_keys(batch.seed, batch.epoch, batch.index, f"view{v}")
            cropped = isinstance(batch.images, tuple)
            parts = [
                self._view(part, part_keys, spec, cropped)
                for part, part_keys in zip(images.split(self.chunk), keys.split(self.chunk), strict=True)
            ]
            views.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return dataclasses.replace(batch, views=tuple(views))

    def _view(self, images: Tensor, keys: Tensor, spec: ViewSpec, cropped: bool) -> Tensor:
        x = images.to(torch.float32).div_(255)
        if not cropped:
            x = self._crop(x, keys, spec)
        if spec.jitter_probability:
            x = self._jitter(x, keys, spec)
        if spec.gray_probability:
            gray = draw.coin(keys, "gray", spec.gray_probability)
            x = ops.blend(x, 1 - gray, torch.ones_like(gray), torch.zeros_like(gray))
        if spec.blur_probability:
            chosen = draw.coin(keys, "blur", spec.blur_probability).nonzero()[:, 0]
            if len(chosen):
                sigma = draw.between(keys, "blur_sigma", *spec.blur_sigma)
                x[chosen] = ops.gaussian_blur(x[chosen], sigma[chosen], spec.blur_kernel)
        if spec.solarize_probability:
            chosen = draw.coin(keys, "solarize", spec.solarize_probability).nonzero()[:, 0]
            if len(chosen):
                x[chosen] = ops.solarize(x[chosen], spec.solarize_threshold)
        mean = torch.tensor(self.mean, device=x.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(-1, 1, 1)
        return x.sub_(mean).div_(std)

    def _crop(self, x: Tensor, keys: Tensor, spec: ViewSpec) -> Tensor:
        height, width = x.shape[2:]
        bicubic = spec.interpolation == "bicubic"
        flip = draw.coin(keys, "flip", spec.flip_probability)
        if spec.pad:
            x = torch.nn.functional.pad(x, (spec.pad,) * 4)
            size = torch.full_like(flip, spec.size)
            top = torch.floor(draw.between(keys, "top", 0, height + 2 * spec.pad - spec.size + 1))
            left = torch.floor(draw.between(keys, "left", 0, width + 2 * spec.pad - spec.size + 1))
            return ops.crop_resize(x, top, left, size, size, flip, spec.size, bicubic=bicubic)
        if spec.crop_scale is not None:
            top, left, h, w = draw.random_resized_crop(keys, height, width, spec.crop_scale, spec.crop_ratio)
        elif spec.flip_probability == 0 and (height, width) == (spec.size, spec.size):
            return x
        else:
            zero = torch.zeros_like(flip)
            top, left, h, w = zero, zero, torch.full_like(flip, height), torch.full_like(flip, width)
        return ops.crop_resize(x, top, left, h, w, flip, spec.size, bicubic=bicubic)

    def _jitter(self, x: Tensor, keys: Tensor, spec: ViewSpec) -> Tensor:
        applied = draw.coin(keys, "jitter", spec.jitter_probability)
        strengths = (spec.brightness, spec.contrast, spec.saturation)
        factors = [
            draw.between(keys, name, max(0.0, 1 - s), 1 + s)
            for name, s in zip(("brightness", "contrast", "saturation"), strengths, strict=True)
        ]
        ones = torch.ones_like(applied)
        factors = [torch.where(applied > 0, f, ones) for f in factors]
        table = torch.stack([*factors, ones], 1)  # (B, 4); hue blends nothing
        order = draw.jitter_order(keys)
        hue = draw.between(keys, "hue", -spec.hue, spec.hue)
        for position in range(4):
            kind = order[:, position]
            factor = table.gather(1, kind[:, None])[:, 0]
            x = ops.blend(x, factor, (kind == 2).float(), (kind == 1).float())
            if spec.hue:
                chosen = ((kind == 3) & (applied > 0)).nonzero()[:, 0]
                if len(chosen):
                    x[chosen] = ops.shift_hue(x[chosen], hue[chosen])
        return x

    def crop_in_worker(self, image: Tensor, index: int, epoch: int, seed: int) -> tuple[Tensor, ...]:
        """Crops of one large image, (C, h, w) uint8 -> one (C, size, size) uint8 a view; flips included."""
        crops = []
        for v, spec in enumerate(self.specs):
            keys = sample_keys(seed, epoch, torch.tensor([index]), f"view{v}")
            mode = InterpolationMode.BICUBIC if spec.interpolation == "bicubic" else InterpolationMode.BILINEAR
            if spec.crop_scale is None:
                short = round(spec.size * 8 / 7)
                crop = TF.center_crop(TF.resize(image, [short], mode, antialias=True), [spec.size, spec.size])
            else:
                box = draw.random_resized_crop(keys, *image.shape[1:], spec.crop_scale, spec.crop_ratio)
                top, left, height, width = (int(p) for p in box)
                crop = TF.resized_crop(image, top, left, height, width, [spec.size, spec.size], mode, antialias=True)
            if float(draw.coin(keys, "flip", spec.flip_probability)):
                crop = TF.horizontal_flip(crop)
            crops.append(crop)
        return tuple(crops)
