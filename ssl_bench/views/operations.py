"""Image operations on a batch, each sample with its own parameters.

Images are planes: float32 in [0, 1], shape (C, B, H, W). With the channel first, arithmetic between channels
and every slice of samples runs over contiguous memory. Each function equals torchvision's operation on float
tensors given the same parameters; parameters have shape (B,). A trailing underscore: the planes are overwritten.

No function moves data between device and host, and no sample's result depends on its batch mates, but on the
image whose style it takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

OUTSIDE = 1e9  # a pixel so far away that no filter reaches it
LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights on tensors


def to_planes(images: Tensor) -> Tensor:
    """Bytes (B, C, H, W) to planes."""
    planes = images.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return planes.mul_(1 / 255)


def resize_matrix(start: Tensor, length: Tensor, flip: Tensor, in_size: int, out_size: int, *, bicubic: bool) -> Tensor:
    """Rows that resample one axis of a crop to `out_size`, antialiased where it shrinks.

    Entry (i, j) is the weight of input pixel j in output pixel i: the triangle or Keys' filter (a = -0.5)
    stretched by max(1, length / out_size), cut to the crop and normalized, as torchvision does with
    `antialias=True` for enlarging and shrinking alike.

    Args:
        start: First pixel of each crop, (B,).
        length: Its pixels, (B,).
        flip: 1 where the output is mirrored, else 0, (B,).
        in_size: Pixels of the whole axis.
        out_size: Pixels of the result.
        bicubic: Keys' filter instead of the triangle.

    Returns:
        Matrices, (B, out_size, in_size), float32; each row sums to one.
    """
    scale = (length / out_size)[:, None]
    i = torch.arange(out_size, device=start.device, dtype=torch.float32)
    i = i + flip[:, None] * (out_size - 1 - 2 * i)
    center = (i + 0.5) * scale
    j = torch.arange(in_size, device=start.device, dtype=torch.float32) - start[:, None]
    j = torch.where((j >= 0) & (j < length[:, None]), j + 0.5, OUTSIDE)
    distance = (j[:, None] - center[:, :, None]).div_(scale.clamp(min=1.0)[:, :, None]).abs_()
    if bicubic:
        near = distance.clamp(max=1)  # both pieces vanish where they are clamped, so their sum is the filter
        far = distance.clamp_(1, 2)
        weight = near.mul(1.5).sub_(2.5).mul_(near).mul_(near).add_(1)
        weight += far.mul(-0.5).add_(2.5).mul_(far).sub_(4).mul_(far).add_(2)
    else:
        weight = distance.neg_().add_(1).clamp_(min=0)
    return weight.div_(weight.sum(2, keepdim=True))


def resized_crop(images: Tensor, box: Tensor, flip: Tensor, size: int, *, bicubic: bool) -> Tensor:
    """Cut a rectangle out of each image, resize it to (size, size), mirror it where asked.

    Args:
        images: Bytes, (B, C, H, W) uint8.
        box: Top, left, height and width of the rectangles, (4, B), pixels.
        flip: 1 to mirror left and right, else 0.
        size: Side of the result.
        bicubic: Bicubic, else bilinear; antialiased.

    Returns:
        Planes, (C, B, size, size), clamped to [0, 1] (bicubic interpolation overshoots).
    """
    top, left, height, width = box
    batch, channels, rows, columns = images.shape
    across = resize_matrix(left, width, flip, columns, size, bicubic=bicubic)
    down = resize_matrix(top, height, torch.zeros_like(flip), rows, size, bicubic=bicubic).mul_(1 / 255)
    half = images.to(torch.float32).reshape(batch, channels * rows, columns)
    half = torch.bmm(half, across.mT).view(batch, channels, rows, size)
    planes = half.new_empty(channels, batch, size, size)
    for c in range(channels):
        torch.bmm(down, half[:, c], out=planes[c])
    return planes.clamp_(0, 1)


def luma(planes: Tensor) -> Tensor:
    """Gray value of each pixel, (B, H, W); one-channel images are their own."""
    if len(planes) == 1:
        return planes[0]
    return (planes[0] * LUMA[0]).add_(planes[1], alpha=LUMA[1]).add_(planes[2], alpha=LUMA[2])


def blend_(planes: Tensor, factor: Tensor, gray_share: Tensor | None, mean_share: Tensor | None) -> Tensor:
    """Blend: x <- clamp(f x + (1 - f) (a gray + b mean(gray))): brightness, contrast, saturation.

    Brightness has (a, b) = (0, 0), contrast (0, 1), saturation (1, 0); f = 1 leaves the sample bitwise unchanged.

    Args:
        planes: Images, overwritten.
        factor: f.
        gray_share: a; None where it is 0 for the whole batch.
        mean_share: b; None where it is 0 for the whole batch.
    """
    other: Tensor | None = None
    if gray_share is not None or mean_share is not None:
        gray = luma(planes)
        if mean_share is not None:
            # two sums of contiguous rows: one long sum would be split by batch size and number of threads
            mean = gray.sum(2).sum(1) / (gray.shape[1] * gray.shape[2])
            other = ((1 - factor) * mean_share * mean)[:, None, None]
        if gray_share is not None:
            own = gray * ((1 - factor) * gray_share)[:, None, None]
            other = own if other is None else own.add_(other)
    planes.mul_(factor[:, None, None])
    if other is not None:
        planes.add_(other)
    return planes.clamp_(0, 1)


def shift_hue_(planes: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of RGB planes by `shift` turns, in [-0.5, 0.5]; overwrites them.

    Equal to a round trip through HSV, without divisions. In units of chroma c = max - min, the hue's distance
    from red is |h| = (g + b - r + max - 2 min) / c sixths of a turn, on green's side where g > b. A channel is
    max - c * clamp(d - 1, 0, 1), with d the distance of the hue from the channel's own: 3 - ||h| - 3| for red
    (|h| <= 6 before wrapping), and, two sixths on, ||h + 1| - 3| for green and ||h - 1| - 3| for blue.
    """
    r, g, b = planes
    top = torch.maximum(r, g)
    top = torch.maximum(top, b, out=top)
    bottom = torch.minimum(r, g)
    bottom = torch.minimum(bottom, b, out=bottom)
    chroma = top - bottom
    hue = (g + b).sub_(r).add_(top).sub_(bottom, alpha=2)
    hue = torch.copysign(hue, torch.sub(g, b, out=bottom), out=hue)
    hue.add_(torch.mul(chroma, 6 * shift[:, None, None], out=bottom))
    for channel, home in ((b, -1), (g, 1), (r, 0)):
        part = torch.add(hue, chroma, alpha=home, out=channel).abs_().sub_(chroma, alpha=3).abs_()
        if home:
            part.sub_(chroma)
        else:
            part.neg_().add_(chroma, alpha=2)
        part.clamp_(min=0)
        torch.minimum(part, chroma, out=part)
        torch.sub(top, part, out=channel)
    return planes


def gaussian_blur(planes: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Gaussian blur with one sigma (pixels) a sample, odd kernel, reflected borders."""
    half = kernel_size // 2
    offset = torch.arange(-half, half + 1, device=planes.device, dtype=torch.float32)
    taps = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    taps = taps / taps.sum(1, keepdim=True)
    taps = taps * (taps > 1e-30)  # denormal numbers would slow the products down several times
    weights = taps.T[:, :, None, None]  # (K, B, 1, 1)
    height, width = planes.shape[2:]
    padded = F.pad(planes, (half, half, half, half), mode="reflect")
    rows = padded[:, :, :height] * weights[0]
    for k in range(1, kernel_size):
        rows.addcmul_(padded[:, :, k : k + height], weights[k])
    result = rows[..., :width] * weights[0]
    for k in range(1, kernel_size):
        result.addcmul_(rows[..., k : k + width], weights[k])
    return result


def solarize(planes: Tensor, threshold: float) -> Tensor:
    """Invert every value at or above the threshold."""
    return torch.where(planes >= threshold, 1 - planes, planes)


def standardize_styles(planes: Tensor, style: Tensor, area: Tensor) -> Tensor:
    """Give every image the low-frequency amplitudes of one image; phases and other amplitudes stay its own.

    Low are the frequencies of at most sqrt(area) / 2 cycles a pixel on either axis: a window that is symmetric under
    k -> -k, so that the result is real, and covers about the share `area` of the spectrum.
    Source: Scalbert et al. 2024 (Batch Styles Standardization), arXiv 2303.06088.

    Args:
        planes: Images, (C, B, H, W).
        style: The image whose amplitudes are taken, (C, H, W).
        area: Share of the spectrum, in [0, 1], a scalar; 0 leaves the images as they are.

    Returns:
        Planes, (C, B, H, W), which may leave [0, 1].
    """
    height, width = planes.shape[2:]
    down = torch.fft.fftfreq(height, device=planes.device, dtype=planes.dtype).abs()
    across = torch.fft.rfftfreq(width, device=planes.device, dtype=planes.dtype)
    low = (torch.maximum(down[:, None], across) <= area.sqrt() / 2) & (area > 0)
    spectrum = torch.fft.rfft2(planes)
    amplitude = torch.fft.rfft2(style).abs()[:, None].expand_as(spectrum)
    spectrum = torch.where(low, torch.polar(amplitude, spectrum.angle()), spectrum)
    result: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return result
