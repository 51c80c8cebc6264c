"""Pretrain one method: Trainer, checkpoints, guards, curve, summary."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from ssl_bench.data import PretrainDataModule
from ssl_bench.errors import ConfigError
from ssl_bench.methods import SSLMethod
from ssl_bench.nn.batch_norm import convert_batch_norm
from ssl_bench.records import Recipe
from ssl_bench.training.callbacks import Checkpointer, CurveWriter, DivergenceGuard, Throughput, latest_checkpoint


@dataclasses.dataclass(frozen=True)
class PretrainSummary:
    """What a finished pretraining cost; `seconds` adds up all resumed parts."""

    seconds: float
    images_per_second: float
    peak_memory_mb: float
    parameters: int
    backbone_parameters: int
    epochs: int
    steps: int
    world_size: int
    notes: tuple[str, ...] = ()


class _GlobalBatchNorm(LayerSync):
    """Batch norm over the global batch, on CPUs too, and where it is fused with an activation."""

    def apply(self, model: nn.Module) -> nn.Module:
        return convert_batch_norm(model, fused=torch.cuda.is_available())

    def revert(self, model: nn.Module) -> nn.Module:
        return model


def build_trainer(
    *,
    folder: Path,
    max_epochs: int,
    max_steps: int = -1,
    precision: str = "32-true",
    devices: int = 1,
    accumulate_grad_batches: int = 1,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Any] = (),
    log_every_n_steps: int = 10,
) -> lightning.Trainer:
    """A Lightning Trainer set up for exact, reproducible pretraining.

    Args:
        folder: Where Lightning may write.
        max_epochs: Epochs to train.
        max_steps: Optimizer steps to train; -1 for no limit.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        devices: Processes in all; several join through torchrun's environment or Slurm's.
        accumulate_grad_batches: Micro-steps of one optimizer step.
        callbacks: Lightning callbacks.
        loggers: Lightning loggers beside the curve file.
        log_every_n_steps: Steps between logged values.
    """
    cuda = torch.cuda.is_available()
    distributed = devices > 1
    cluster, nodes = _cluster(devices)
    return lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices // nodes,
        num_nodes=nodes,
        strategy=DDPStrategy(
            process_group_backend="nccl" if cuda else "gloo",
            broadcast_buffers=False,  # statistics are global already
            gradient_as_bucket_view=True,
        )
        if distributed
        else "auto",
        plugins=[cluster, _GlobalBatchNorm()] if distributed else [cluster],
        precision=precision,  # type: ignore[arg-type]
        max_epochs=max_epochs,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate_grad_batches,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=log_every_n_steps,
        logger=list(loggers) or False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _cluster(devices: int) -> tuple[ClusterEnvironment, int]:
    """Who started the processes of this trial, and on how many machines."""
    if devices > 1 and TorchElasticEnvironment.detect():
        return TorchElasticEnvironment(), 1
    if devices > 1 and int(os.environ.get("SLURM_NTASKS", "1")) == devices:
        # a job that must stop is requeued by the sweep, once its checkpoint is written
        return SLURMEnvironment(auto_requeue=False), int(os.environ.get("SLURM_NNODES", "1"))
    return LightningEnvironment(), 1


def pretrain(
    method: SSLMethod,
    data: PretrainDataModule,
    *,
    folder: Path,
    recipe: Recipe,
    epochs: int,
    max_steps: int = -1,
    precision: str = "32-true",
    devices: int = 1,
    checkpoint_every_seconds: float = 60.0,
    checkpoint_every_steps: int | None = None,
    log_every_n_steps: int = 10,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Callback] = (),
) -> PretrainSummary:
    """Train a method until the budget is spent, from the last checkpoint in `folder` if there is one.

    A resumed run ends in the same weights as an uninterrupted one, bit for bit on the same hardware.

    Args:
        method: The objective, freshly built.
        data: Batches; its accumulation is the Trainer's.
        folder: Where checkpoints, curve.csv and pretrain.json go.
        recipe: Optimizer and schedule.
        epochs: Epochs of the budget.
        max_steps: Optimizer steps after which training ends, -1 for no limit; schedules end there too.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        devices: Processes in all.
        checkpoint_every_seconds: Time between checkpoints.
        checkpoint_every_steps: Steps between checkpoints instead of time, for tests.
        log_every_n_steps: Steps between points of the curve.
        loggers: Lightning loggers beside curve.csv.
        callbacks: Further callbacks, such as an online probe.

    Raises:
        ConfigError: If accumulation would change the objective.
        DivergedError: If the loss became NaN or infinite.
        InterruptedRunError: If a signal asked to stop; the checkpoint is written.
    """
    accumulate = data.accumulate_grad_batches
    if accumulate > 1 and (method.regularizers or not method.loss_is_sample_mean):
        raise ConfigError(
            f"Gradient accumulation must equal a larger batch, but the loss of {type(method).__name__} couples the "
            "samples of a batch (negatives, statistics or assignments), so the objective would change. Use more "
            "devices or a smaller recipe.global_batch_size."
        )
    if accumulate > 1 and any(spec.style_area for spec in data.view_pipeline.specs):
        raise ConfigError(
            "Gradient accumulation must equal a larger batch, but views with `style_area` take their style from one "
            "image of each micro-step's batch. Use more devices, a smaller recipe.global_batch_size, or no style_area."
        )
    if recipe.global_batch_size < method.min_global_batch:
        raise ConfigError(
            f"{type(method).__name__} needs a global batch of at least {method.min_global_batch}, got "
            f"{recipe.global_batch_size}. Raise recipe.global_batch_size."
        )
    folder.mkdir(parents=True, exist_ok=True)
    method.recipe = recipe
    checkpoint, notes = latest_checkpoint(folder)
    throughput, curve = Throughput(), CurveWriter(folder)
    checkpointer = Checkpointer(
        folder, curve, every_seconds=checkpoint_every_seconds, every_steps=checkpoint_every_steps
    )
    trainer = build_trainer(
        folder=folder,
        max_epochs=epochs,
        max_steps=max_steps,
        precision=precision,
        devices=devices,
        accumulate_grad_batches=accumulate,
        callbacks=[DivergenceGuard(), throughput, curve, *callbacks, checkpointer],
        loggers=loggers,
        log_every_n_steps=log_every_n_steps,
    )
    trainer.fit(method, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return PretrainSummary(
        seconds=throughput.seconds,
        images_per_second=throughput.images_per_second(data.global_batch_size),
        peak_memory_mb=peak_memory_mb(),
        parameters=sum(p.numel() for p in method.parameters() if p.requires_grad),
        backbone_parameters=sum(p.numel() for p in method.evaluation_backbone.parameters()),
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        world_size=trainer.world_size,
        notes=tuple(notes),
    )


def peak_memory_mb() -> float:
    """Peak memory of this process in MB: of the device on CUDA, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
