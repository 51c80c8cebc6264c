"""What happens to one trial: pretrain, export, evaluate; each stage ends in a file written whole."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

from ssl_bench.config import ProtocolConfig, TrialConfig
from ssl_bench.data import Dataset, PretrainDataModule, load_dataset
from ssl_bench.distributed import is_rank_zero
from ssl_bench.errors import CollapsedError, IncompatibleTrialError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocol import PROTOCOLS
from ssl_bench.methods import METHODS, SSLMethod
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import Backbone, build_backbone
from ssl_bench.nn.backbone_io import load_backbone, save_backbone
from ssl_bench.random import derive_seed
from ssl_bench.records import MetricRow, Recipe
from ssl_bench.results.store import read_json, write_bytes, write_json
from ssl_bench.sweep.eigenmodes import Eigenmodes
from ssl_bench.sweep.online_probe import OnlineKNN
from ssl_bench.sweep.plan import plain
from ssl_bench.sweep.progress import Progress
from ssl_bench.training import PretrainSummary, pretrain
from ssl_bench.views import ViewPipeline, build_views

METHOD_WEIGHTS = "method.safetensors"  # the whole method, for trials that start from it
FAILURE = "failure.json"  # what the first rank that failed says; the others only see their peers leave
COLLAPSE_IMAGES = 512
# Standard deviation of unit embeddings relative to an isotropic one (1 / sqrt(D)). A constant embedding
# shows only float32 rounding, below 1e-6; healthy ones lie between 0.1 and 1.
COLLAPSE_FLOOR = 1e-3


def device() -> torch.device:
    """The device this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build_trial(config: TrialConfig, dataset: Dataset) -> tuple[SSLMethod, ViewPipeline | None]:
    """The method with its initial weights, a function of the seed, and its view pipeline."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "backbone"))
        backbone = build_backbone(
            config.backbone["name"],
            in_channels=dataset.channels,
            image_size=dataset.image_size,
            **config.backbone["arguments"],
        )
    views = None
    facts = {"num_classes": dataset.num_classes, "num_samples": 0, "num_views": 0}
    if config.views is not None:
        views = build_views(
            config.views["name"],
            image_size=dataset.image_size,
            channels=dataset.channels,
            mean=dataset.mean,
            std=dataset.std,
            overrides=config.views["overrides"],
        )
        facts |= {"num_samples": len(dataset.split(dataset.pretrain_split)), "num_views": views.num_views}
    arguments = {key: _tuples(value) for key, value in config.method["arguments"].items()}
    method = build_method(
        config.method["name"],
        backbone,
        seed=config.seed,
        facts=facts,
        arguments=arguments,
        regularizers=[
            {**r, "arguments": {key: _tuples(value) for key, value in r["arguments"].items()}}
            for r in config.method.get("regularizers", ())
        ],
    )
    return method, views


def start_from(method: SSLMethod, source: Path) -> str:
    """Load the final weights of another trial; returns a note of what was loaded.

    Everything is taken over where the source has each of the method's parameters in its shape; otherwise the
    backbone alone (online and target).

    Args:
        method: The method to start.
        source: Folder of the finished trial.

    Raises:
        IncompatibleTrialError: If that trial has not finished its pretraining.
    """
    if not is_pretrained(source):
        raise IncompatibleTrialError(
            f"A trial with `init_from` needs the other trial's weights, but {source} has not finished "
            "pretraining. Look at its status, mend it, and run the study with --retry-broken.",
            reason="init_from",
        )
    state, own = load_file(source / METHOD_WEIGHTS), method.state_dict()
    if all(key in state and state[key].shape == value.shape for key, value in own.items()):
        method.load_state_dict({key: state[key] for key in own})
        return f"started from the whole state of trial {source.name}"
    weights = load_backbone(source).state_dict()
    for module in method.modules():
        if isinstance(module, Backbone):
            module.load_state_dict(weights)
    return f"started from the backbone of trial {source.name}"


def pretrain_stage(config: TrialConfig, folder: Path) -> None:
    """Pretrain (or take the untrained network of a baseline) and export the backbone.

    pretrain.json is written last: it says that the stage is done.

    Raises:
        CollapsedError: If the embedding is constant; backbone and summary are written nevertheless.
    """
    dataset = load_dataset(config.dataset["name"], **config.dataset["arguments"])
    method, views = build_trial(config, dataset)
    if METHODS.get(config.method["name"]).trainable:
        assert views is not None
        assert config.recipe is not None
        recipe = Recipe(**{key: _tuples(value) for key, value in config.recipe.items()})
        data = PretrainDataModule(
            dataset,
            views,
            global_batch_size=recipe.global_batch_size,
            seed=config.seed,
            with_labels=method.uses_labels,
            num_workers=config.num_workers,
            accumulate_grad_batches=config.accumulate_grad_batches,
        )
        probes: list[Any] = [OnlineKNN(dataset, config.online_knn_epochs)] if config.online_knn_epochs else []
        if config.eigenmode_steps:
            probes.append(Eigenmodes(dataset, folder, config.eigenmode_steps))
        loggers: list[Any] = []
        if config.loggers:
            from ssl_bench.sweep.loggers import build_loggers

            loggers = build_loggers(config, folder)
        notes = [start_from(method, folder.parent / config.init_from)] if config.init_from else []
        summary = pretrain(
            method,
            data,
            folder=folder,
            recipe=recipe,
            epochs=config.budget["epochs"],
            max_steps=config.budget["max_steps"] or -1,
            precision=config.precision,
            devices=config.devices,
            log_every_n_steps=config.log_every_n_steps,
            loggers=loggers,
            callbacks=[*probes, Progress(folder)],
        )
        summary = dataclasses.replace(summary, notes=(*notes, *summary.notes))
    else:
        summary = PretrainSummary(
            seconds=0.0,
            images_per_second=0.0,
            peak_memory_mb=0.0,
            parameters=0,
            backbone_parameters=sum(p.numel() for p in method.evaluation_backbone.parameters()),
            epochs=0,
            steps=0,
            world_size=1,
        )
    if not is_rank_zero():
        return
    backbone = method.evaluation_backbone.to("cpu").eval()
    spread = embedding_spread(method, dataset)
    state = {key: value.cpu().clone() for key, value in method.state_dict().items()}
    write_bytes(folder / METHOD_WEIGHTS, save(state))
    save_backbone(backbone, folder, dataset=dataset.name, mean=list(dataset.mean), std=list(dataset.std))
    write_json(
        folder / "pretrain.json",
        {
            **plain(dataclasses.asdict(summary)),
            "embedding_spread": spread,
            "dataset": dataset.describe(),
            "views": config.views,
            "hardware": hardware(),
            "versions": versions(),
            "commit": commit(),
        },
    )
    check_collapse(spread, summary.steps)


def embedding_spread(method: SSLMethod, dataset: Dataset) -> float:
    """Mean standard deviation of unit embeddings, relative to that of an isotropic embedding."""
    store = dataset.split(dataset.pretrain_split)
    views = build_views(
        "eval", image_size=dataset.image_size, channels=dataset.channels, mean=dataset.mean, std=dataset.std
    )
    index = torch.arange(min(COLLAPSE_IMAGES, len(store)))
    batches = view_batches(store, views, list(index.split(64)), device=next(iter(method.parameters()), index).device)
    unit = F.normalize(torch.cat([method.embed(batch.views[0]) for batch in batches]).double(), dim=1)
    return float(unit.std(0, unbiased=False).mean() * unit.shape[1] ** 0.5)


def check_collapse(spread: float, steps: int) -> None:
    """Raise CollapsedError if the spread is that of a constant embedding."""
    if spread < COLLAPSE_FLOOR:
        raise CollapsedError(
            f"The embedding must differ between images, but its spread is {spread:.1e} of an isotropic one: the run "
            "collapsed. Lower recipe.base_lr, or check the term that prevents collapse.",
            step=steps,
        )


def check_pretrained(folder: Path) -> None:
    """Raise CollapsedError if the finished pretraining stage ended in a constant embedding."""
    facts = read_json(folder / "pretrain.json")
    check_collapse(facts["embedding_spread"], facts["steps"])


def evaluate_stage(protocol: ProtocolConfig, context: EvaluationContext, folder: Path) -> None:
    """Run one protocol on the exported backbone and write its rows."""
    arguments = {key: _tuples(value) for key, value in protocol.arguments.items()}
    rows: list[MetricRow] = PROTOCOLS.get(protocol.name)(**arguments).run(context)
    write_json(folder / "rows" / f"{protocol.key}.json", [dataclasses.asdict(row) for row in rows])


def evaluation_context(config: TrialConfig, folder: Path) -> EvaluationContext:
    """The exported backbone on the trial's dataset.

    Raises:
        IncompatibleTrialError: If the images are not those of pretraining.
    """
    dataset = load_dataset(config.dataset["name"], **config.dataset["arguments"])
    then, now = read_json(folder / "pretrain.json")["dataset"]["fingerprint"], dataset.fingerprint
    if then != now:
        raise IncompatibleTrialError(
            f"A backbone must be judged on the data it was pretrained on, but the content of {dataset.name!r} has "
            f"changed since (fingerprint {then}, now {now}). Restore the data, or remove {folder} to pretrain again.",
            reason="dataset",
        )
    return EvaluationContext(
        load_backbone(folder),
        dataset,
        work_dir=folder / "evaluation",
        seed=config.seed,
        device=device(),
        num_workers=config.num_workers,
    )


def is_pretrained(folder: Path) -> bool:
    """Whether the pretraining stage is done."""
    return (folder / "pretrain.json").exists()


def pending_protocols(config: TrialConfig, folder: Path) -> list[ProtocolConfig]:
    """Protocols without rows of their present version."""
    pending = []
    for protocol in config.protocols:
        path = folder / "rows" / f"{protocol.key}.json"
        try:
            rows = read_json(path) if path.exists() else []
            current = bool(rows) and all(row["protocol_version"] == protocol.version for row in rows)
        except Exception:  # a torn or foreign file: measure again
            current = False
        if not current:
            pending.append(protocol)
    return pending


def hardware() -> str:
    """What the trial ran on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} ({platform.machine()})"
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("ssl_bench", "torch", "torchvision", "lightning", "timm", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def commit() -> str:
    """Commit of the code with "+dirty" if it was changed, or "" outside a checkout."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+dirty" if git("status", "--porcelain", "--untracked-files=no", "--", "ssl_bench") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
