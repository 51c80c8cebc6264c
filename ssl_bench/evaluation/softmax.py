r"""Multinomial logistic regression solved to convergence on cached features.

Minimizes J(W, b) = (1/n) \sum_i CE(W x_i + b, y_i) + (l2 / 2) ||W||^2: a softmax with the rows of ALL
classes penalized and a free bias. It is scikit-learn's objective with C = 1 / (n l2), divided by C n.

The method is L-BFGS with two facts used: logits are linear in the weights, so a line search needs no
pass over the features; and at W = 0 the Hessian is X'X / (n C) + l2 I for every class up to a null
direction, whose Cholesky factor starts the inverse Hessian.

Shapes: n samples, D features, C classes. Logits are kept as (C, n), so that reductions over classes
run along contiguous samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

MAX_GRAM = 4096  # above this width the Gram matrix costs more than it saves
MEMORY = 20  # correction pairs kept


@dataclasses.dataclass(frozen=True)
class Standardizer:
    """Shift and scale that give the fitting samples mean 0 and deviation 1; constant features become 0."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, features: Tensor) -> Standardizer:
        """Statistics of (n, D) features, accumulated in float64."""
        mean = features.mean(dim=0, dtype=torch.float64)
        var = torch.zeros_like(mean)
        for chunk in features.split(8192):
            var += (chunk.double() - mean).square().sum(dim=0)
        std = (var / len(features)).sqrt()
        # float32 features that are equal up to rounding have a deviation near 1e-7 of their size
        constant = std <= 1e-6 * features.abs().amax(dim=0)
        scale = torch.where(constant, 0.0, 1.0 / std)
        return cls(mean.to(features.dtype), scale.to(features.dtype))

    def __call__(self, features: Tensor) -> Tensor:
        """Standardized features."""
        return (features - self.mean) * self.scale

    @property
    def num_constant(self) -> int:
        """Features without variation."""
        return int((self.scale == 0).sum())


class ClassMap:
    """Between the dataset's classes and the K of them that have training samples.

    A class without samples has no finite optimum (its free bias runs to minus infinity), so the solver
    does not see it and it ranks last.
    """

    def __init__(self, labels: Tensor, num_classes: int) -> None:
        self.present, self.dense = labels.unique(return_inverse=True)
        self.num_classes = num_classes

    def expand(self, scores: Tensor) -> Tensor:
        """(M, K) scores to (M, C), minus infinity for absent classes."""
        out = scores.new_full((len(scores), self.num_classes), -torch.inf)
        out[:, self.present] = scores
        return out


@dataclasses.dataclass(frozen=True)
class SoftmaxSolution:
    """Minimizer found: weights and bias side by side, (C, D + 1) float64; `pairs` serve a warm start."""

    theta: Tensor
    l2: float
    objective: float
    iterations: int
    converged: bool
    pairs: list[tuple[Tensor, Tensor, float]] = dataclasses.field(repr=False)

    def scores(self, features: Tensor) -> Tensor:
        """Logits of (M, D) features, (M, C)."""
        theta = self.theta.to(features.dtype)
        return features @ theta[:, :-1].T + theta[:, -1]


class SoftmaxRegression:
    """The data of one problem, solved for any number of l2 values.

    Args:
        features: (n, D), standardized for the preconditioner to pay.
        labels: (n,) int64 in [0, C).
        num_classes: C.
    """

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        self.x = features
        self.labels = labels[None]
        self.num_classes = num_classes
        self.gram = (features.T @ features).double() / len(features) if features.shape[1] <= MAX_GRAM else None

    def solve(
        self, l2: float, *, start: SoftmaxSolution | None = None, tolerance: float = 1e-7, max_iterations: int = 500
    ) -> SoftmaxSolution:
        """Minimize for one l2 >= 0.

        Args:
            l2: Weight of the penalty on W.
            start: Solution of this problem at another l2 to start from; zeros by default.
            tolerance: Stop when a step is expected to lower J by less than this fraction.
            max_iterations: Passes over the features at most (each reads them twice).
        """
        x, num = self.x, len(self.x)
        width = x.shape[1]
        theta = torch.zeros(self.num_classes, width + 1, dtype=torch.float64, device=x.device)
        penalized = torch.ones(width + 1, dtype=torch.float64, device=x.device)
        penalized[-1] = 0.0
        pairs: list[tuple[Tensor, Tensor, float]] = []
        if start is not None:
            theta = start.theta
            for s, y, _ in start.pairs:  # the penalty's part of a curvature pair is known exactly
                y = y + (l2 - start.l2) * s * penalized
                pairs.append((s, y, float((s * y).sum())))
        precondition = self._preconditioner(l2)

        logits = self._logits(theta)
        loss, residual = self._loss(logits)
        gradient = self._gradient(residual) + l2 * theta * penalized
        value = loss + 0.5 * l2 * float((theta.square() * penalized).sum())
        converged = False
        iterations = 0
        while iterations < max_iterations:
            iterations += 1
            direction = -_two_loop(gradient, pairs, precondition)
            slope = float((gradient * direction).sum())
            if -slope <= 2 * tolerance * abs(value):  # a Newton step would lower J by -slope / 2
                converged = True
                break
            change = self._logits(direction)
            penalty = 0.5 * l2 * float((theta.square() * penalized).sum())
            linear = l2 * float((theta * direction * penalized).sum())
            quadratic = l2 * float((direction.square() * penalized).sum())

            # exact up to a factor: J is convex along the line and an evaluation needs no pass over the features
            low, high, low_slope, high_slope, step = 0.0, 0.0, slope, 0.0, 1.0
            for _ in range(30):
                new_logits = torch.add(logits, change, alpha=step)
                new_loss, residual = self._loss(new_logits)
                weighted = torch.einsum("cn,cn->n", residual, change).sum(dtype=torch.float64)
                new_slope = float(weighted) / num + linear + step * quadratic
                new_value = new_loss + penalty + step * linear + 0.5 * step**2 * quadratic
                rounding = 1e-9 * abs(value)
                if abs(new_slope) <= 0.5 * -slope and new_value <= value + 1e-4 * step * slope + rounding:
                    break
                if new_slope < 0:
                    low, low_slope = step, new_slope
                else:
                    high, high_slope = step, new_slope
                if high == 0.0:
                    step *= 3.0
                else:
                    secant = low - low_slope * (high - low) / (high_slope - low_slope)
                    margin = 0.1 * (high - low)
                    step = min(max(secant, low + margin), high - margin)
            else:
                break  # the line is flat to rounding: nothing left to gain
            new_theta = theta + step * direction
            new_gradient = self._gradient(residual) + l2 * new_theta * penalized
            s, y = new_theta - theta, new_gradient - gradient
            curvature = float((s * y).sum())
            if curvature > 0:
                pairs = [*pairs[-(MEMORY - 1) :], (s, y, curvature)]
            theta, gradient, logits, value = new_theta, new_gradient, new_logits, new_value
        return SoftmaxSolution(theta, l2, value, iterations, converged, pairs)

    def objective(self, theta: Tensor, l2: float) -> float:
        """J at given weights and bias (C, D + 1)."""
        return self._loss(self._logits(theta))[0] + 0.5 * l2 * float(theta[:, :-1].square().sum())

    def _logits(self, theta: Tensor) -> Tensor:
        theta = theta.to(self.x.dtype)
        # measured: features times weights, then a small transpose, is 1.7x faster than weights times features'
        return torch.addmm(theta[:, -1], self.x, theta[:, :-1].T).T.contiguous()

    def _loss(self, logits: Tensor) -> tuple[float, Tensor]:
        """Mean cross-entropy, summed in float64, and probabilities minus one-hot labels (C, n).

        Well-fitted samples have losses and residuals far below 1, so neither is formed as a difference
        with 1: that would leave float32 four digits, and the solver would stall.
        """
        largest, place = logits.max(dim=0, keepdim=True)
        residual = logits.sub(largest)
        margin = residual.gather(0, self.labels)  # <= 0; 0 where the label has the largest logit
        residual.exp_().scatter_(0, place, 0.0)
        others = residual.sum(dim=0, keepdim=True)
        loss = float((torch.log1p(others) - margin).sum(dtype=torch.float64)) / len(self.x)
        residual.scatter_(0, place, 1.0).div_(1.0 + others).scatter_(0, self.labels, 0.0)
        return loss, residual.scatter_(0, self.labels, -residual.sum(dim=0, keepdim=True))

    def _gradient(self, residual: Tensor) -> Tensor:
        mean = residual / len(self.x)
        return torch.cat([mean @ self.x, mean.sum(dim=1, keepdim=True)], dim=1).double()

    def _preconditioner(self, l2: float) -> Tensor | None:
        """Cholesky factor of the Hessian at zero; None where its diagonal has to do."""
        if self.gram is None:
            return None
        hessian = self.gram / self.num_classes
        hessian.diagonal().add_(l2)
        # dependent features leave eigenvalues that float32 may round below zero: lift them as little as works
        lift = 1e-6 / self.num_classes
        while True:
            hessian.diagonal().add_(lift)
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(hessian)
            if not failed:
                return factor
            lift *= 10.0


def _apply(factor: Tensor | None, gradient: Tensor) -> Tensor:
    if factor is None:
        return gradient
    # the bias column is not coupled to centered features, and its curvature is 1 / C
    weight = torch.cholesky_solve(gradient[:, :-1].T, factor).T
    return torch.cat([weight, gradient[:, -1:] * len(gradient)], dim=1)


def _two_loop(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, float]], factor: Tensor | None) -> Tensor:
    """Inverse Hessian times gradient (Nocedal and Wright 2006, algorithm 7.4), started from `factor`."""
    q = gradient.clone()
    alphas = []
    for s, y, curvature in reversed(pairs):
        alpha = float((s * q).sum()) / curvature
        q -= alpha * y
        alphas.append(alpha)
    r = _apply(factor, q)
    if pairs:
        _, y, curvature = pairs[-1]
        r *= curvature / float((y * _apply(factor, y)).sum())
    for (s, y, curvature), alpha in zip(pairs, reversed(alphas), strict=True):
        r += (alpha - float((y * r).sum()) / curvature) * s
    return r


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero: a converged softmax is full of them, and CPUs slow down on them."""
    before = float(torch.tensor([1e-310], dtype=torch.float64).mul(1.0)) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
