"""LARS, layer-wise adaptive rate scaling.

timm's LARS decides by weight decay which tensors adapt, so it cannot express SimCLR-style exclusion at
weight decay 0; this one takes the group's `adapted` flag and runs in fused multi-tensor passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose gradient is rescaled per tensor to a share of the weights' norm.

    u = g + wd w; r = trust ||w|| / ||u|| (1 where a norm is 0); m = momentum m + r u; w -= lr m.
    Source: You et al. 2017, arXiv 1708.03888, in the form of the BYOL, Barlow Twins and VICReg code.
    The SimCLR code keeps lr inside the momentum buffer, which is the same at a constant lr.

    With `clip` (LARC, the form of solo-learn's LARS): r = min(1, trust ||w|| / (lr (||g|| + wd ||w||))),
    so that the effective rate lr r is the adapted rate itself, but at most lr.

    Args:
        params: Parameter groups; a group with `adapted` False gets plain SGD with momentum.
        lr: Learning rate.
        momentum: Momentum in [0, 1).
        trust: Trust coefficient.
        clip: Divide the adapted rate by lr and cap it at 1.
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
            updates, decay = grads, group["weight_decay"]
            if decay:
                updates = list(torch._foreach_add(grads, params, alpha=decay))
            if group["adapted"]:
                weight_norms = torch.stack(torch._foreach_norm(params))
                if group["clip"]:
                    norms = torch.stack(torch._foreach_norm(grads))
                    norms = torch.where(norms > 0, norms + decay * weight_norms, norms) * group["lr"]
                else:
                    norms = torch.stack(torch._foreach_norm(updates))
                known = (weight_norms > 0) & (norms > 0)
                ratios = torch.where(known, group["trust"] * weight_norms / norms, 1.0)
                if group["clip"]:
                    ratios = ratios.clamp(max=1.0)
                updates = list(torch._foreach_mul(updates, ratios.unbind()))
            buffers = []
            for p in params:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
        return loss
