"""Image operations on a batch, each sample with its own parameters.

Images are floating point in [0, 1], shape (B, C, H, W). Each function equals torchvision's operation on
float tensors given the same parameters; parameters are tensors of shape (B,).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GRAY = (0.299, 0.587, 0.114)


def resize_matrix(start: Tensor, length: Tensor, in_size: int, out_size: int, flip: Tensor, bicubic: bool) -> Tensor:
    """Rows that resample one axis of a crop to `out_size`, antialiased when it shrinks.

    Entry (i, j) is the weight of input pixel j in output pixel i: the triangle or Keys (a = -0.5) filter
    stretched by max(1, length / out_size), cut to the crop and normalized, as torchvision does with
    `antialias=True`. With `flip` the output is mirrored.

    Args:
        start: First pixel of each crop, (B,).
        length: Its pixels, (B,).
        in_size: Pixels of the whole axis.
        out_size: Pixels of the result.
        flip: 1 where mirrored, else 0, (B,).
        bicubic: Keys filter instead of the triangle.

    Returns:
        Matrices, (B, out_size, in_size), float32.
    """
    i = torch.arange(out_size, device=start.device, dtype=torch.float32)
    i = torch.where(flip[:, None] > 0, out_size - 1 - i, i)  # (B, out)
    scale = (length / out_size)[:, None]
    center = (i + 0.5) * scale
    j = torch.arange(in_size, device=start.device, dtype=torch.float32) - start[:, None]  # (B, in)
    distance = ((j[:, None] + 0.5 - center[:, :, None]) / scale.clamp(min=1.0)[:, :, None]).abs()
    if bicubic:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = near * (distance < 1) + far * ((distance >= 1) & (distance < 2))
    else:
        weight = (1 - distance).clamp(min=0)
    weight = weight * ((j >= 0) & (j < length[:, None]))[:, None]
    return weight / weight.sum(2, keepdim=True)


def crop_resize(
    images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: int, *, bicubic: bool
) -> Tensor:
    """Cut a rectangle out of each image, resize it to (size, size), mirror where asked; clamped to [0, 1]."""
    no_flip = torch.zeros_like(flip)
    rows = resize_matrix(top, height, images.shape[2], size, no_flip, bicubic)
    columns = resize_matrix(left, width, images.shape[3], size, flip, bicubic)
    return (rows[:, None] @ images @ columns[:, None].mT).clamp_(0, 1)


def to_gray(images: Tensor) -> Tensor:
    """Luma of each pixel, (B, 1, H, W); one-channel images are their own."""
    if images.shape[1] == 1:
        return images
    r, g, b = images.unbind(1)
    return (r * GRAY[0] + g * GRAY[1] + b * GRAY[2])[:, None]


def blend(images: Tensor, factor: Tensor, gray_share: Tensor, mean_share: Tensor) -> Tensor:
    """clamp(f x + (1 - f) (a gray + b mean(gray))): brightness, contrast, saturation and grayscale at once.

    Brightness has (a, b) = (0, 0), contrast (0, 1), saturation (1, 0), grayscale saturation with f = 0.
    """
    f, a, b = (p.view(-1, 1, 1, 1) for p in (factor, gray_share, mean_share))
    gray = to_gray(images)
    other = a * gray + b * gray.mean((1, 2, 3), keepdim=True)
    return (f * images + (1 - f) * other).clamp_(0, 1)


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of RGB images by `shift` turns, in [-0.5, 0.5].

    Equal to a round trip through HSV: channel = max - chroma * clamp(2 - |k - 2|, 0, 1) with
    k = (6 (hue + shift) + {5, 3, 1}) mod 6.
    """
    r, g, b = images.unbind(1)
    top = images.amax(1)
    chroma = top - images.amin(1)
    safe = chroma.clamp(min=torch.finfo(images.dtype).tiny)
    safe = torch.where(chroma > 0, safe, torch.ones_like(safe))
    sixth = torch.where(
        top == r, (g - b) / safe, torch.where(top == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )  # hue in sixths of a turn
    sixth = sixth + 6 * shift.view(-1, 1, 1)
    channels = [top - chroma * (2 - (torch.remainder(sixth + n, 6) - 2).abs()).clamp(0, 1) for n in (5, 3, 1)]
    return torch.stack(channels, 1)


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Gaussian blur with one sigma a sample, odd kernel, reflected borders."""
    half = kernel_size // 2
    offset = torch.arange(-half, half + 1, device=images.device, dtype=images.dtype)
    taps = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    taps = taps / taps.sum(1, keepdim=True)  # (B, K)
    batch, channels, height, width = images.shape
    flat = F.pad(images, (half, half, half, half), mode="reflect").reshape(1, batch * channels, height + 2 * half, -1)
    weight = taps.repeat_interleave(channels, 0)
    flat = F.conv2d(flat, weight.view(-1, 1, 1, kernel_size), groups=batch * channels)
    flat = F.conv2d(flat, weight.view(-1, 1, kernel_size, 1), groups=batch * channels)
    return flat.view(batch, channels, height, width)


def solarize(images: Tensor, threshold: float) -> Tensor:
    """Invert every value at or above the threshold."""
    return images + (images >= threshold) * (1 - 2 * images)
