"""From stored bytes to normalized random views, on the device of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode

from ssl_bench.distributed import gather, local_slice
from ssl_bench.errors import ConfigError, DataError
from ssl_bench.random import sample_keys, uniform
from ssl_bench.records import Batch
from ssl_bench.views import operations as ops
from ssl_bench.views import parameters as draw

CHUNK_PIXELS = 2**17  # of the views made at once on a CPU: the planes of one chunk stay in its caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """The distribution of one view. Probabilities and strengths of 0 leave an operation out.

    `crop_scale` None takes the whole image (resized to `size` if need be); `pad` instead crops `size` pixels
    out of the image padded with zeros. The color jitter's order is random for each sample.

    `style_area` (low, high) switches batch styles standardization on (Scalbert et al. 2024): after the crop, all images
    of the global batch take the low-frequency amplitudes of one of them, of a share ~ U(low, high) of the spectrum.
    Image and share are drawn anew for each step and view. The paper's range of shares was not at hand; [0.02, 1] is
    a start.

    Each run of `shared_by` successive samples of the global batch gets one draw for all: that of its first sample.

    Raises:
        ConfigError: If a value is out of its range.
    """

    size: int
    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 0
    interpolation: str = "bicubic"
    flip_probability: float = 0.5
    style_area: tuple[float, float] | None = None
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
    shared_by: int = 1

    def __post_init__(self) -> None:
        def need(ok: bool, what: str, got: object) -> None:
            if not ok:
                raise ConfigError(f"{what}, got {got!r} in a view of {self.size} px. Change it in the study's views.")

        need(self.size >= 1, "`size` must be at least 1 pixel", self.size)
        if self.crop_scale is not None:
            low, high = self.crop_scale
            need(0 < low <= high <= 1, "`crop_scale` must be (low, high) with 0 < low <= high <= 1", self.crop_scale)
        low, high = self.crop_ratio
        need(0 < low <= high, "`crop_ratio` must be (low, high) with 0 < low <= high", self.crop_ratio)
        need(self.pad >= 0, "`pad` must be at least 0 pixels", self.pad)
        need(not self.pad or self.crop_scale is None, "`pad` needs `crop_scale` to be null", self.crop_scale)
        need(
            self.interpolation in ("bicubic", "bilinear"),
            "`interpolation` must be bicubic or bilinear",
            self.interpolation,
        )
        if self.style_area is not None:
            low, high = self.style_area
            need(0 <= low <= high <= 1, "`style_area` must be (low, high) with 0 <= low <= high <= 1", self.style_area)
        for name in ("flip", "jitter", "gray", "blur", "solarize"):
            value = getattr(self, f"{name}_probability")
            need(0 <= value <= 1, f"`{name}_probability` must be in [0, 1]", value)
        for name in ("brightness", "contrast", "saturation"):
            need(getattr(self, name) >= 0, f"`{name}` must be at least 0", getattr(self, name))
        need(0 <= self.hue <= 0.5, "`hue` must be in [0, 0.5] turns", self.hue)
        if self.blur_probability:
            low, high = self.blur_sigma
            need(0 < low <= high, "`blur_sigma` must be (low, high) with 0 < low <= high", self.blur_sigma)
            need(self.blur_kernel % 2 == 1, "`blur_kernel` must be odd", self.blur_kernel)
            need(
                0 < self.blur_kernel < 2 * self.size,
                "`blur_kernel` must be below twice the size, since borders are reflected once",
                self.blur_kernel,
            )
        need(0 <= self.solarize_threshold <= 1, "`solarize_threshold` must be in [0, 1]", self.solarize_threshold)
        need(self.shared_by >= 1, "`shared_by` must be at least 1 sample", self.shared_by)

    @property
    def jitters(self) -> bool:
        """Whether the view has color jitter."""
        return self.jitter_probability > 0 and any((self.brightness, self.contrast, self.saturation, self.hue))


class ViewPipeline:
    """Makes the views of a batch; each is a function of (seed, epoch, sample index, view) alone.

    On a CPU a view is bitwise the same whatever the batch, its order and the number of threads; between devices
    it is the same up to rounding. On other devices nothing waits for the device. A view with `style_area` also depends
    on which samples are in the global batch, but not on their order or ranks; one with `shared_by` above 1 on their
    order, but not on ranks. All ranks must make such views together.

    Args:
        name: Name of the recipe.
        specs: One distribution a view.
        channels: Image channels, 1 or 3; operations on color are left out for one channel.
        mean: Mean of each channel, as a fraction of the largest value.
        std: Standard deviation of each channel.

    Raises:
        ConfigError: If the number of channels is neither, or does not fit `mean` and `std`.
    """

    def __init__(
        self, name: str, specs: tuple[ViewSpec, ...], *, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        if channels not in (1, 3) or len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise ConfigError(
                "Views need images of 1 or 3 channels with a mean and a positive std for each, got "
                f"{channels} channels, mean {mean} and std {std}. Correct the dataset's attributes."
            )
        self.name = name
        self.channels = channels
        self.skipped: dict[str, str] = {}
        if channels == 1:
            color = {"saturation": "saturation", "hue": "hue", "grayscale": "gray_probability"}
            asked = [word for word, field in color.items() if any(getattr(spec, field) for spec in specs)]
            self.skipped = dict.fromkeys(asked, "the images have one channel")
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
        """Everything that decides the views, and what was left out for one-channel images; JSON types."""
        facts = {
            "name": self.name,
            "specs": [_facts(spec) for spec in self.specs],
            "mean": self.mean,
            "std": self.std,
            "skipped": self.skipped,
        }
        plain: dict[str, Any] = json.loads(json.dumps(facts))
        return plain

    def __call__(self, batch: Batch) -> Batch:
        """Fill in `batch.views`: float32, normalized, one (B, C, size, size) a view.

        Raises:
            DataError: If the batch's images are not bytes of the pipeline's channels, or not one crop a view.
        """
        self._check(batch)
        device = batch.index.device
        with torch.no_grad(), _full_precision(device):
            return dataclasses.replace(
                batch, views=tuple(self._view(batch, v, subset=device.type == "cpu") for v in range(self.num_views))
            )

    def _check(self, batch: Batch) -> None:
        crops = batch.images if isinstance(batch.images, tuple) else (batch.images,)
        if isinstance(batch.images, tuple) and len(crops) != self.num_views:
            raise DataError(
                f"A batch of cropped images needs one crop a view, got {len(crops)} for {self.num_views} views of "
                f"{self.name!r}. Crop with this pipeline's `crop_in_worker`."
            )
        for images in crops:
            if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != self.channels:
                raise DataError(
                    f"The views {self.name!r} need uint8 images (B, {self.channels}, H, W), got {images.dtype} of "
                    f"shape {tuple(images.shape)}. Take them from the dataset's store."
                )

    def _view(self, batch: Batch, v: int, *, subset: bool) -> Tensor:
        """One view of the batch.

        With `subset` an operation runs on the samples that were chosen for it, which needs their number on the
        host; otherwise on all of them with a mask. The results are bitwise equal.
        """
        spec = self.specs[v]
        cropped = isinstance(batch.images, tuple)
        images = batch.images[v] if isinstance(batch.images, tuple) else batch.images
        index = batch.index if spec.shared_by == 1 else _first_of_run(batch.index, spec.shared_by)
        keys = sample_keys(batch.seed, batch.epoch, index, f"view{v}")
        numbers = draw.draw_numbers(keys)
        order = bounds = jitter = None
        if spec.jitters and subset:
            order, bounds = _jitter_order(_jitter(numbers, spec))
            keys, numbers = keys[order], numbers[:, order]
        if spec.jitters:
            jitter = _jitter(numbers, spec)
        u = draw.named(numbers)
        flip = (u["flip"] < spec.flip_probability).float()
        box = None if cropped else self._box(keys, u, spec, *images.shape[2:])

        def crop(part: slice | Tensor) -> Tensor:
            own = images[part] if order is None else images.index_select(0, order[part])
            if box is None and cropped and spec.shared_by > 1:  # workers, who mirror others, do not know the run
                return torch.where(flip[part, None, None] > 0, ops.to_planes(own).flip(3), ops.to_planes(own))
            if box is None:
                return ops.to_planes(own)
            own = torch.nn.functional.pad(own, (spec.pad,) * 4) if spec.pad else own
            bicubic = spec.interpolation == "bicubic"
            return ops.resized_crop(own, box[:, part], flip[part], spec.size, bicubic=bicubic)

        style = None if spec.style_area is None else self._style(batch, v, spec.style_area, order, crop)
        chunk = max(1, CHUNK_PIXELS // spec.size**2) if subset else max(1, len(keys))
        out = torch.empty(len(keys), self.channels, spec.size, spec.size, device=keys.device)
        for start in range(0, len(keys), chunk):
            part = slice(start, start + chunk)
            planes = crop(part)
            if style is not None:
                planes = ops.standardize_styles(planes, *style).clamp_(0, 1)
            if jitter is not None:
                limits = None if bounds is None else [min(max(b - start, 0), planes.shape[1]) for b in bounds]
                _apply_jitter(planes, jitter, part, limits)
            planes = _apply_rest(planes, {name: row[part] for name, row in u.items()}, spec, subset)
            for plane, mean, std in zip(planes, self.mean, self.std, strict=True):
                plane.sub_(mean).mul_(1 / std)
            if order is None:
                out[part] = planes.transpose(0, 1)
            else:
                out.index_copy_(0, order[part], planes.transpose(0, 1))
        return out

    @staticmethod
    def _style(
        batch: Batch, v: int, limits: tuple[float, float], order: Tensor | None, crop: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The crop whose style view v of the global batch takes, (C, size, size), and the share of the spectrum.

        It is that of the sample with the smallest key: each rank offers its own smallest, all choose among them.
        """
        keys = sample_keys(batch.seed, batch.epoch, batch.index, f"view{v}/style")
        keys = keys if order is None else keys[order]
        own = keys.argmin(0, keepdim=True)
        offered, crops = gather(keys[own]), gather(crop(own).transpose(0, 1))  # (ranks,), (ranks, C, size, size)
        first = offered.argmin(0, keepdim=True)
        area = draw.between(uniform(offered[first], 1, "area")[0, 0], *limits)
        return crops.index_select(0, first)[0], area

    @staticmethod
    def _box(keys: Tensor, u: dict[str, Tensor], spec: ViewSpec, height: int, width: int) -> Tensor | None:
        """Top, left, height and width of what each sample keeps, (4, B); None where that is the image itself."""
        if spec.pad:
            side = torch.full_like(u["flip"], spec.size)
            top, left = draw.padded_crop(u, height + 2 * spec.pad, width + 2 * spec.pad, spec.size)
            return torch.stack([top, left, side, side])
        if spec.crop_scale is not None:
            return draw.random_resized_crop(keys, height, width, spec.crop_scale, spec.crop_ratio)
        if not spec.flip_probability and height == width == spec.size:
            return None
        zero = torch.zeros_like(u["flip"])
        return torch.stack([zero, zero, zero + height, zero + width])

    def crop_in_worker(self, image: Tensor, index: int, epoch: int, seed: int) -> tuple[Tensor, ...]:
        """Crops of one large image, (C, h, w) uint8 -> one (C, size, size) uint8 a view; flips included.

        The parameters are those that the pipeline would draw on the device for an image of this shape. A view
        without random crop is the center of the image resized to 8/7 of the view's size (256 for 224 px).

        Raises:
            ConfigError: If a shared view has a random crop: a worker does not know which images share it.
        """
        crops = []
        for v, spec in enumerate(self.specs):
            keys = sample_keys(seed, epoch, torch.tensor([index]), f"view{v}")
            u = draw.named(draw.draw_numbers(keys))
            mode = InterpolationMode.BICUBIC if spec.interpolation == "bicubic" else InterpolationMode.BILINEAR
            square = [spec.size, spec.size]
            if spec.shared_by > 1 and (spec.crop_scale is not None or spec.pad):
                raise ConfigError(
                    "Views of large images that share their draws cannot be cropped at random, got `crop_scale` "
                    f"{spec.crop_scale} and `pad` {spec.pad} in view {v} of {self.name!r}. Set them to null and 0."
                )
            if spec.crop_scale is not None:
                height, width = image.shape[1:]
                box = draw.random_resized_crop(keys, height, width, spec.crop_scale, spec.crop_ratio)
                top, left, height, width = box[:, 0].int().tolist()
                crop = TF.resized_crop(image, top, left, height, width, square, mode, antialias=True)
            elif spec.pad:
                crop = TF.center_crop(TF.resize(image, [spec.size], mode, antialias=True), square)
                crop = TF.pad(crop, [spec.pad])
                top, left = (int(p) for p in draw.padded_crop(u, crop.shape[1], crop.shape[2], spec.size))
                crop = crop[:, top : top + spec.size, left : left + spec.size]
            else:
                short = round(spec.size * 8 / 7)
                crop = TF.center_crop(TF.resize(image, [short], mode, antialias=True), square)
            if spec.shared_by == 1 and u["flip"] < spec.flip_probability:
                crop = TF.horizontal_flip(crop)
            crops.append(crop.contiguous())
        return tuple(crops)


def _facts(spec: ViewSpec) -> dict[str, Any]:
    """All fields, less later ones where they are off: descriptions from before they existed stay what they were."""
    later = {"style_area": None, "shared_by": 1}
    return {key: value for key, value in dataclasses.asdict(spec).items() if later.get(key, ...) != value}


def _first_of_run(index: Tensor, length: int) -> Tensor:
    """For each sample of this rank the index of the first one in its run of `length` of the global batch, (B,)."""
    rows = torch.arange(len(index), device=index.device) + local_slice(len(index), index.device).start
    return gather(index)[rows // length * length]


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a reduced matrix-product precision of the trainer reaches the pixels."""
    before = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _jitter(numbers: Tensor, spec: ViewSpec) -> draw.Jitter:
    strengths = (spec.brightness, spec.contrast, spec.saturation, spec.hue)
    return draw.jitter(draw.named(numbers), spec.jitter_probability, *strengths)


def _jitter_order(jitter: draw.Jitter) -> tuple[Tensor, list[int]]:
    """An order of the samples in which each step of the jitter concerns a contiguous run of them.

    Returns:
        Indices (B,), ascending in the number of blends before the hue shift, samples without jitter last; and
        for each j in 0..K the number of samples with at most j blends before the hue shift.
    """
    blends = jitter.factors.shape[1]
    group = torch.where(jitter.applied, jitter.before, blends + 1)
    bounds: list[int] = torch.bincount(group, minlength=blends + 2).cumsum(0)[: blends + 1].tolist()
    return group.argsort(stable=True), bounds


def _apply_jitter(planes: Tensor, jitter: draw.Jitter, part: slice, bounds: list[int] | None) -> None:
    """Blends before the hue shift, the shift, blends after it; `bounds` as from `_jitter_order`, or None for masks."""
    blends = jitter.factors.shape[1]

    def blend(j: int, early: bool) -> None:
        run = slice(None)
        factor = jitter.factors[part, j]
        if bounds is None:
            due = (jitter.before[part] > j) == early
            factor = torch.where(due & jitter.applied[part], factor, 1.0)
        else:
            run = slice(bounds[j], bounds[-1]) if early else slice(0, bounds[j])
            if run.start >= run.stop:
                return
            factor = factor[run]
        shares = [None if s is None else s[part, j][run] for s in (jitter.gray_shares, jitter.mean_shares)]
        ops.blend_(planes[:, run], factor, *shares)

    for j in range(blends):
        if jitter.hue is not None:
            blend(j, early=True)
    if jitter.hue is not None:
        hue = jitter.hue[part]
        if bounds is not None:
            ops.shift_hue_(planes[:, : bounds[-1]], hue[: bounds[-1]])
        else:
            shifted = ops.shift_hue_(planes.clone(), hue)
            planes.copy_(torch.where(jitter.applied[part, None, None], shifted, planes))
    for j in range(blends):
        blend(j, early=False)


def _apply_rest(planes: Tensor, u: dict[str, Tensor], spec: ViewSpec, subset: bool) -> Tensor:
    """Grayscale, blur, solarization."""
    if spec.gray_probability:
        planes = _on_chosen(planes, u["gray"] < spec.gray_probability, subset, lambda x, _: ops.luma(x).expand_as(x))
    if spec.blur_probability:
        sigma = draw.between(u["blur_sigma"], *spec.blur_sigma)
        planes = _on_chosen(
            planes,
            u["blur"] < spec.blur_probability,
            subset,
            lambda x, samples: ops.gaussian_blur(x, sigma[samples], spec.blur_kernel),
        )
    if spec.solarize_probability:
        planes = _on_chosen(
            planes,
            u["solarize"] < spec.solarize_probability,
            subset,
            lambda x, _: ops.solarize(x, spec.solarize_threshold),
        )
    return planes


def _on_chosen(
    planes: Tensor, chosen: Tensor, subset: bool, operation: Callable[[Tensor, Tensor | slice], Tensor]
) -> Tensor:
    """Replace the chosen samples by `operation(planes, samples)` of them."""
    if not subset:
        return torch.where(chosen[:, None, None], operation(planes, slice(None)), planes)
    samples = chosen.nonzero()[:, 0]
    if len(samples) == planes.shape[1]:
        return operation(planes, slice(None)).contiguous()
    if len(samples):
        planes.index_copy_(1, samples, operation(planes.index_select(1, samples), samples))
    return planes
