"""Batch normalization over the global batch, also on CPUs (torch's SyncBatchNorm needs an accelerator)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ssl_bench.distributed import all_reduce_sum_with_grad, is_distributed


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm1d/2d/3d whose training statistics are those of all ranks together.

    The variance is the mean squared deviation from the global mean (two reductions), not
    E[x^2] - E[x]^2, which cancels in float32. Ranks may hold different numbers of samples.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"GlobalBatchNorm needs at least 2 axes, got shape {tuple(x.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, ...) per channel."""
        use_batch = self.training or not self.track_running_stats
        if not (use_batch and is_distributed()):
            return super().forward(x)
        self._check_input_dim(x)
        axes = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = torch.full((1,), values.numel() / values.shape[1], dtype=values.dtype, device=x.device)
        sums = all_reduce_sum_with_grad(torch.cat([values.sum(axes), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centered = values - mean.view(shape)
        var = all_reduce_sum_with_grad(centered.square().sum(axes)) / total
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None and self.running_var is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), weight)
                unbiased = var.detach() * (total / (total - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        out = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)


def convert_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm by one over the global batch, keeping its parameters and buffers in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            converted = GlobalBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            converted._parameters = child._parameters
            converted._buffers = child._buffers
            converted.training = child.training
            setattr(module, name, converted)
        else:
            convert_batch_norm(child)
    return module
