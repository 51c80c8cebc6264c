"""Linear classification of frozen features by SGD: many learning rates trained as one batched problem.

Source: the rates, momentum, decay, schedule and head of DINOv2's probe (arXiv 2304.07193); the
reference shows augmented images, here the features of the evaluation view are extracted once.
Shapes: n samples, B in a batch, D features, K classes, R learning rates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import Protocol, labelled, missing_classes, rank_classes, register_protocol
from ssl_bench.evaluation.softmax import ClassMap, Standardizer, flushed_denormals
from ssl_bench.optim import cosine
from ssl_bench.random import epoch_permutation, normal, sample_keys
from ssl_bench.records import MetricRow

MOMENTUM = 0.9
INIT_STD = 0.01
MIN_STEPS = 500  # few samples make short epochs: train longer than `epochs` then
BASE_LRS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


def train_heads(
    features: Tensor, labels: Tensor, num_classes: int, *, lrs: Tensor, epochs: int, batch_size: int, seed: int
) -> Tensor:
    """Train one linear head a learning rate, all on the same batches.

    SGD with momentum 0.9 and no weight decay; the rate follows a half cosine to 0 over all steps. The
    last, incomplete batch of an epoch is dropped unless it is the only one.

    Args:
        features: (n, D).
        labels: (n,) in [0, K).
        num_classes: K.
        lrs: Peak learning rates, (R,).
        epochs: Passes over the samples.
        batch_size: Samples a step, B.
        seed: Seed of the initial weights and of the order.

    Returns:
        Weights and biases, (R, K, D + 1).
    """
    num, width = features.shape
    batch_size = min(batch_size, num)
    steps_per_epoch = num // batch_size
    keys = sample_keys(seed, 0, torch.arange(num_classes), "head")
    head = torch.cat([INIT_STD * normal(keys, width, "weight"), torch.zeros(num_classes, 1)], dim=1)
    theta = head.to(features).repeat(len(lrs), 1)  # (R K, D + 1)
    velocity = torch.zeros_like(theta)
    rates = lrs.to(features).repeat_interleave(num_classes)[:, None]
    x = torch.cat([features, features.new_ones(num, 1)], dim=1)
    for epoch in range(epochs):
        order = epoch_permutation(seed, epoch, num).to(features.device)
        for step in range(steps_per_epoch):
            batch = order[step * batch_size : (step + 1) * batch_size]
            x_batch = x[batch]
            residual = (x_batch @ theta.T).view(batch_size, len(lrs), num_classes).softmax(dim=2)
            index = labels[batch, None, None].expand(-1, len(lrs), 1)
            residual.scatter_add_(2, index, residual.new_full((1, 1, 1), -1.0).expand_as(index))
            velocity.mul_(MOMENTUM).addmm_(residual.view(batch_size, -1).T, x_batch, alpha=1 / batch_size)
            factor = cosine(1.0, 0.0, (epoch * steps_per_epoch + step) / (epochs * steps_per_epoch))
            theta.addcmul_(rates, velocity, value=-factor)
    return theta.view(len(lrs), num_classes, width + 1)


@register_protocol("linear_sgd", version=1)
class LinearSGD(Protocol):
    """SGD linear probe on standardized features; learning rate chosen on validation, refit on both.

    The head of the last step counts. `linear` solves the same model to convergence; this variant is for
    comparison with published probes.

    Args:
        base_lrs: Peak learning rates per 256 samples; equal validation accuracies go to the smaller.
        epochs: Passes over the features; at least 500 steps are done.
        batch_size: Samples a step.
    """

    def __init__(self, *, base_lrs: tuple[float, ...] = BASE_LRS, epochs: int = 30, batch_size: int = 256) -> None:
        if not base_lrs or min(base_lrs) <= 0:
            raise ConfigError(f"`base_lrs` must be numbers > 0, got {list(base_lrs)} (protocol linear_sgd).")
        if epochs < 1 or batch_size < 1:
            raise ConfigError(
                f"`epochs` and `batch_size` must be >= 1, got {epochs} and {batch_size} (protocol linear_sgd)."
            )
        self.base_lrs = tuple(sorted(set(base_lrs)))
        self.epochs = epochs
        self.batch_size = batch_size

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `top1` and `top5`."""
        num_classes, device = context.dataset.num_classes, context.device
        train, validation = labelled(context, "train"), labelled(context, "validation")
        both = train.joined(validation)

        def fit(features: Tensor, labels: Tensor, base_lrs: tuple[float, ...]) -> tuple[Standardizer, ClassMap, Tensor]:
            features = features.to(device)
            standardize = Standardizer.fit(features)
            classes = ClassMap(labels.to(device), num_classes)
            heads = train_heads(
                standardize(features),
                classes.dense,
                len(classes.present),
                lrs=torch.tensor(base_lrs) * self.batch_size / 256,
                epochs=max(self.epochs, -(-MIN_STEPS // max(1, len(labels) // self.batch_size))),
                batch_size=self.batch_size,
                seed=context.seed,
            )
            return standardize, classes, heads

        def rankings(fitted: tuple[Standardizer, ClassMap, Tensor], features: Tensor) -> list[Tensor]:
            standardize, classes, heads = fitted
            x = standardize(features.to(device))
            return [rank_classes(classes.expand(x @ head[:, :-1].T + head[:, -1])).cpu() for head in heads]

        with flushed_denormals():
            fitted = fit(train.features, train.labels, self.base_lrs)
            finite = fitted[2].isfinite().all(dim=2).all(dim=1).tolist()  # a rate that diverged cannot win
            accuracies = [
                float((ranking[:, 0] == validation.labels).double().mean()) if ok else 0.0
                for ranking, ok in zip(rankings(fitted, validation.features), finite, strict=True)
            ]
            best = accuracies.index(max(accuracies))
            fitted = fit(both.features, both.labels, (self.base_lrs[best],))
            test = labelled(context, "test")
            ranking = rankings(fitted, test.features)[0]
        self.save_predictions(context, test.labels, {"top1": ranking[:, 0]})
        return self.accuracy_rows(
            ranking,
            test.labels,
            num_classes,
            selected_on="validation",
            note="; ".join(filter(None, (both.note, test.note))),
            details={
                "base_lr": self.base_lrs[best],
                "base_lrs": list(self.base_lrs),
                "validation_top1": accuracies,
                "base_lr_at_grid_edge": len(self.base_lrs) > 1 and best in (0, len(self.base_lrs) - 1),
                "epochs": self.epochs,
                "batch_size": self.batch_size,
                "n_train": len(both),
                "num_constant_features": fitted[0].num_constant,
                "classes_missing_in_train": missing_classes(both.labels, num_classes),
            },
        )
