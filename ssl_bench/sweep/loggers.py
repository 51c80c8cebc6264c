"""Experiment trackers a study may ask for; they never block or end a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from ssl_bench.config import TrialConfig
from ssl_bench.errors import ConfigError

WAIT_SECONDS = 3.0


def build_loggers(config: TrialConfig, folder: Path) -> list[Any]:
    """The trackers that a trial asks for, beside curve.csv.

    Raises:
        ConfigError: If one's package is not installed.
    """
    loggers = []
    if "wandb" in config.loggers:
        loggers.append(wandb_logger(config, folder))
    if "tensorboard" in config.loggers:
        try:
            loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
        except ModuleNotFoundError as error:
            raise ConfigError("The logger tensorboard needs its package. Install ssl_bench[tensorboard].") from error
    return loggers


def wandb_logger(config: TrialConfig, folder: Path) -> Any:
    """One wandb run a trial, named by its id, so that a retry goes on in the same run; offline without network."""
    offline = os.environ.get("WANDB_MODE") == "offline" or not _reachable("api.wandb.ai", 443)
    return WandbLogger(
        project="ssl_bench",
        name=config.label,
        id=config.id,
        group=folder.parent.parent.name,
        save_dir=folder,
        offline=offline,
        resume=None if offline else "allow",
        config=config.to_json(),
    )


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=WAIT_SECONDS).close()
    except OSError:
        return False
    return True
