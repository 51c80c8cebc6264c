"""The contract of a pretraining method: one LightningModule that turns views into a loss.

The base class owns the step, the logging, the optimizer built from the recipe, and the schedule.
It owns no probe, no metric and no data; labels never reach it unless the class says `uses_labels`.

Shapes: B images on this rank, N over all ranks, D embedding width, P projection width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import lightning
import torch
from torch import Tensor, nn

from ssl_bench.distributed import is_distributed
from ssl_bench.errors import ConfigError
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.modes import evaluation_mode
from ssl_bench.optim import ParameterGroup, apply_schedule, build_optimizer
from ssl_bench.records import Batch, LossOutput, Recipe
from ssl_bench.registry import Entry, Registry
from ssl_bench.regularizers import AttachedRegularizer, regularized_loss

METHODS: Registry[type[SSLMethod]] = Registry("method", "ssl_bench.methods")
register_method = METHODS.register


class SSLMethod(lightning.LightningModule):
    """A pretraining objective around a backbone. A method overrides `__init__` and `loss`.

    Constructor arguments after the backbone are keyword-only, typed and documented: they are the
    method's configuration schema. `num_classes`, `num_samples` and `num_views`, where declared without
    a default, are filled in by the harness from the data and the view recipe.

    Random numbers of a step come from `batch.keys(...)` and `ssl_bench.random`, never from torch's
    global generator, so that runs do not depend on world size or on a resume.

    Class attributes:
        recipes: Default recipe per data family: "small" (28-32 px on a CPU budget), "cifar"
            (32-96 px), "imagenet" (larger). A study may override any key.
        arguments: Default constructor arguments per data family where they differ from the signature's.
        uses_labels: The method sees labels (supervised references only); the table says so.
        loss_is_sample_mean: The loss is a mean over samples of terms that do not couple samples, so
            gradient accumulation equals a larger batch (batch normalization aside).
        min_global_batch: Smallest global batch for which the loss is defined; an instance may raise it.
        backbones: Kinds of backbone it runs on, of "cnn" and "vit".
        trainable: False for baselines without pretraining.
        fixed_backbone: Name of the backbone a baseline brings along; None to take the study's.
    """

    registry_entry: ClassVar[Entry]
    recipes: ClassVar[Mapping[str, Recipe]] = {}
    arguments: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_labels: ClassVar[bool] = False
    loss_is_sample_mean: ClassVar[bool] = False
    min_global_batch: int = 2
    backbones: ClassVar[tuple[str, ...]] = ("cnn", "vit")
    trainable: ClassVar[bool] = True
    fixed_backbone: ClassVar[str | None] = None

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        if backbone.kind not in self.backbones:
            raise ConfigError(
                f"{type(self).__name__} runs on backbones of kind {' or '.join(self.backbones)}, got "
                f"{backbone.name!r} of kind {backbone.kind!r}. Choose another backbone for this method in the study."
            )
        self.backbone = backbone
        self.recipe: Recipe | None = None
        self.regularizers: list[AttachedRegularizer] = []  # terms that a study adds; set by the builder
        self.latest: dict[str, Tensor] = {}  # loss and terms of the last step, on the device

    # ---- what a method writes -------------------------------------------------------------------

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Loss of one step.

        Args:
            views: One (B, C, h, w) floating-point tensor a view.
            batch: The samples the views were made from: indices and random keys, no labels.

        Returns:
            The total (its mean over ranks is the loss of the global batch, see
            `ssl_bench.distributed`) and named terms to log.
        """
        raise NotImplementedError

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Hook after optimizer step number `step` (from 1) of `num_steps`: momentum encoders, queues."""

    def on_pretrain_start(self) -> None:
        """Hook before the first step, on the device: memories that need the data's size."""

    def pass_over_data(self) -> Iterator[Batch]:
        """This rank's batches of the first epoch, with views, for a memory to fill before a fresh run's first step.

        Nothing on a resume, whose state has the memory, and outside a Trainer.
        """
        if self._trainer is None or self.trainer.global_step:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for batch in data.train_dataloader():
            yield data.on_after_batch_transfer(batch.to(self.device), 0)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Groups of trainable parameters with their own rates; one group by default."""
        return [ParameterGroup(list(self.trainable_parameters()))]

    @property
    def evaluation_backbone(self) -> Backbone:
        """The network that is exported and evaluated: the online backbone unless the paper says otherwise."""
        return self.backbone

    # ---- what every method gets -----------------------------------------------------------------

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """Embeddings (B, D) in evaluation mode, without gradient; the mode is restored afterwards."""
        with evaluation_mode(self.evaluation_backbone):
            embedding: Tensor = self.evaluation_backbone(images)
            return embedding

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that the optimizer updates."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    @classmethod
    def default_recipe(cls, family: str) -> Recipe:
        """The class's recipe for a data family; the nearest smaller one where none is stated."""
        order = ("small", "cifar", "imagenet")
        for key in reversed(order[: order.index(family) + 1]):
            if key in cls.recipes:
                return cls.recipes[key]
        return next(iter(cls.recipes.values()))

    @classmethod
    def default_arguments(cls, family: str) -> Mapping[str, Any]:
        """The class's constructor arguments for a data family, where they differ from the signature's."""
        return cls.arguments.get(family, {})

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.trainer.estimated_stepping_batches)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return max(1, int(self.trainer.num_training_batches) // self.trainer.accumulate_grad_batches)

    def objective(self, batch: Batch) -> LossOutput:
        """What is minimized: the method's loss and the study's regularizers."""
        if not self.regularizers:
            return self.loss(batch.views, batch)
        return regularized_loss(lambda: self.loss(batch.views, batch), self, self.regularizers, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Views -> loss -> log. Not overridden by methods."""
        if not batch.views:
            raise ConfigError(
                f"{type(self).__name__} needs a batch with views, got none. Give the Trainer a PretrainDataModule, "
                "whose view pipeline makes them on the device."
            )
        output = self.objective(batch)
        self.latest = {"train/loss": output.total.detach()}
        self.latest |= {f"train/{name}": value for name, value in output.terms.items()}
        trainer: Any = self.trainer
        if trainer.loggers and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self.log_dict(self.latest, on_step=True, on_epoch=False, batch_size=len(batch), sync_dist=is_distributed())
        return output.total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of `self.recipe` (by default the class's recipe for small data)."""
        if self.recipe is None:
            self.recipe = self.default_recipe("small")
        return build_optimizer(self.parameter_groups(), self.recipe)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Set the scheduled rates for this step, step, then call `after_optimizer_step` once."""
        assert self.recipe is not None
        step, num_steps = self.trainer.global_step, self.num_steps
        apply_schedule(optimizer, self.recipe, step, num_steps, self.steps_per_epoch)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.after_optimizer_step(step + 1, num_steps)

    def on_train_start(self) -> None:
        """Run the method's own start hook once the module is on its device."""
        self.on_pretrain_start()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip as the recipe says; the Trainer's own clipping stays off."""
        recipe = self.recipe
        assert recipe is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        if recipe.clip_norm_per_parameter is not None:
            limit = recipe.clip_norm_per_parameter
            norms = torch._foreach_norm([p.grad for p in parameters])
            torch._foreach_mul_([p.grad for p in parameters], [(limit / (n + 1e-6)).clamp(max=1.0) for n in norms])
