"""LARS, layer-wise adaptive rate scaling.

timm's LARS decides by weight decay which tensors adapt, so it cannot express SimCLR-style exclusion at
weight decay 0; this one takes the group's `adapted` flag and runs in fused multi-tensor passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose gradient is rescaled per tensor: g <- g * trust * ||w|| / ||g + wd w||.

    Update: g += wd w; g *= trust ||w|| / ||g|| (1 where a norm is 0); m = momentum m + g; w -= lr m.
    With `clip`, the ratio never exceeds 1 / lr, so that the adapted rate is at most lr (LARC).
    Source: You et al. 2017, arXiv 1708.03888; the form of the BYOL, Barlow Twins and VICReg code.
    The SimCLR code keeps lr inside the momentum buffer, which is the same at a constant lr.

    Args:
        params: Parameter groups; a group with `adapted` False gets plain SGD with momentum.
        lr: Learning rate.
        momentum: Momentum in [0, 1).
        trust: Trust coefficient.
        clip: Cap the adapted rate at lr.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, momentum: float = 0.9, trust: float = 0.001, clip: bool = False
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "trust": trust, "clip": clip, "weight_decay": 0.0, "adapted": True}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            if group["adapted"]:
                ratios = [
                    torch.where((w > 0) & (g > 0), group["trust"] * w / g, torch.ones_like(w))
                    for w, g in zip(torch._foreach_norm(params), torch._foreach_norm(grads), strict=True)
                ]
                if group["clip"]:
                    limit = 1.0 / group["lr"] if group["lr"] > 0 else float("inf")
                    ratios = [ratio.clamp(max=limit) for ratio in ratios]
                grads = list(torch._foreach_mul(grads, ratios))
            buffers = []
            for p in params:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
        return loss
