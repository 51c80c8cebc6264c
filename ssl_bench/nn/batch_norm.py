"""Batch normalization over the global batch, also on CPUs (torch's SyncBatchNorm needs an accelerator)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ssl_bench.distributed import all_reduce_sum_with_grad, is_distributed
from ssl_bench.errors import ConfigError


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
        if not (self.training and is_distributed()):
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
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
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


class GlobalBatchNormAct(GlobalBatchNorm):
    """timm's batch norm with dropout and activation inside, over the global batch."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, H, W) per channel, then drop and activate."""
        return self.act(self.drop(super().forward(x)))  # type: ignore[no-any-return]


def convert_batch_norm(module: nn.Module, *, fused: bool = False) -> nn.Module:
    """Replace every BatchNorm by one over the global batch, keeping parameters, buffers and their names.

    Args:
        module: A network on any device.
        fused: Take torch's SyncBatchNorm, faster but for accelerators only, where it can stand in.

    Returns:
        The same module with its children replaced, or the replacement if it is a BatchNorm itself.

    Raises:
        ConfigError: If a module derives from BatchNorm and does something else that is not known here.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, GlobalBatchNorm | nn.SyncBatchNorm):
        return _converted(module, fused)
    for name, child in module.named_children():
        setattr(module, name, convert_batch_norm(child, fused=fused))
    return module


def _converted(module: _BatchNorm, fused: bool) -> _BatchNorm:
    cls: type[_BatchNorm]
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        cls = nn.SyncBatchNorm if fused else GlobalBatchNorm
    elif type(module).__name__ == "BatchNormAct2d":  # timm's, by name: importing timm takes seconds
        cls = GlobalBatchNormAct
    else:
        raise ConfigError(
            "Training on several devices needs batch norm over the global batch, but this network has "
            f"{type(module).__name__}, whose forward pass is not known here. Train it on one device."
        )
    converted = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    converted._parameters = module._parameters
    converted._buffers = module._buffers
    converted._modules = module._modules
    converted.training = module.training
    return converted
