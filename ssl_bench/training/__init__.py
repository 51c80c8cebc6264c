"""Pretraining: the Trainer, exact resume, guards, curves and the cost of a run."""

from ssl_bench.training.callbacks import CurveWriter
from ssl_bench.training.pretrain import PretrainSummary, build_trainer, pretrain

__all__ = ["CurveWriter", "PretrainSummary", "build_trainer", "pretrain"]
