"""Trial folders as a study writes them, with figures drawn from known means."""

import json
import math
from pathlib import Path

import numpy as np

METHODS = {  # name: (family, uses labels, linear top-1, seconds)
    "random_init": ("baseline", False, 0.766, 0.0),
    "raw_pixels": ("baseline", False, 0.813, 0.0),
    "supervised": ("supervised", True, 0.905, 60.0),
    "simclr": ("contrastive", False, 0.858, 75.0),
    "byol": ("distillation", False, 0.852, 90.0),
    "vicreg": ("redundancy reduction", False, 0.861, 82.0),
    "mae": ("masked image modeling", False, 0.842, 140.0),
}


def dump(path: Path, obj) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(obj), encoding="utf-8")


def metric_row(protocol, metric, value, **facts):
    row = {
        "protocol": protocol, "protocol_version": 1, "metric": metric, "value": value, "higher_is_better": True,
        "n_test": 2000, "split": "test", "selected_on": "validation", "note": "", "details": {},
    }  # fmt: skip
    return {**row, **facts}


def write_trial(
    study: Path,
    trial: str,
    *,
    dataset="fashion_mnist_mini",
    method="simclr",
    seed=0,
    status="done",
    reason="",
    epochs=8,
    backbone="conv4",
    arguments=None,
    family="contrastive",
    uses_labels=False,
    seconds=75.0,
    values=None,
    protocols=("linear", "knn"),
    curve=True,
) -> Path:
    """One trial folder; `values` maps (protocol, metric) to figures."""
    folder = study / "trials" / trial
    protocols = dict.fromkeys((*protocols, *(protocol for protocol, _ in values or {})))
    dump(folder / "trial.json", {
        "dataset": {"name": dataset, "arguments": {}},
        "method": {"name": method, "version": 1, "arguments": arguments or {}, "family": family,
                   "uses_labels": uses_labels},
        "backbone": {"name": backbone, "version": 1, "arguments": {"width": 16}},
        "recipe": {"optimizer": "adam", "base_lr": 0.002, "global_batch_size": 128, "source": "ours"},
        "budget": {"epochs": epochs},
        "seed": seed, "precision": "32-true", "devices": 1, "note": "",
        "protocols": [{"name": name, "version": 1, "arguments": {}} for name in protocols],
    })  # fmt: skip
    dump(folder / "status.json", {"status": status, "reason": reason, "step": 5, "stage": "pretrain"})
    if status == "done":
        dump(folder / "pretrain.json", {
            "seconds": seconds, "images_per_second": 1050.25, "peak_memory_mb": 310.5, "parameters": 1_234_567,
            "backbone_parameters": 98_765, "epochs": epochs, "steps": 600, "world_size": 1, "hardware": "2 CPU cores",
            "versions": {"torch": "2.14.1", "lightning": "2.6.6"}, "commit": "0123abc", "views": {}, "notes": [],
        })  # fmt: skip
    by_protocol: dict = {}
    for (protocol, metric), value in (values or {}).items():
        by_protocol.setdefault(protocol, []).append(metric_row(protocol, metric, value))
    for protocol, rows in by_protocol.items():
        dump(folder / "rows" / f"{protocol}.json", rows)
    if curve and epochs and status == "done":
        top = (values or {}).get(("linear", "top1"), 0.8)
        lines = ["step,epoch,lr,train/loss,probe/knn_top1"]
        for step in range(61):
            epoch = step * epochs / 60
            probe = f"{top - 0.12 * math.exp(-epoch / 2) - 0.04:.4f}" if step % 10 == 0 else ""
            loss = 1 + 3 * math.exp(-epoch) + 0.05 * math.sin(step * 7 + seed)
            lines.append(f"{step * 10},{epoch:.4f},0.001,{loss:.4f},{probe}")
        (folder / "curve.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_study(study: Path, *, seeds=3, datasets=("fashion_mnist_mini",), methods=METHODS) -> Path:
    """A study of several methods in which `mae` diverges at its last seed."""
    generator = np.random.default_rng(0)
    for dataset in datasets:
        for method, (family, uses_labels, top, seconds) in methods.items():
            for seed in range(seeds):
                noise = 0.0 if method == "raw_pixels" else generator.normal(0, 0.003)
                broken = method == "mae" and seed == seeds - 1
                write_trial(
                    study, f"{method}-{dataset}-{seed}", dataset=dataset, method=method, seed=seed, family=family,
                    uses_labels=uses_labels, seconds=seconds * (1 + 0.02 * seed), epochs=8 if seconds else 0,
                    status="diverged" if broken else "done",
                    reason="the loss became NaN at step 5" if broken else "",
                    values={} if broken else {
                        ("linear", "top1"): top + noise, ("knn", "top1_k20"): top - 0.05 + noise,
                        ("linear", "top5"): 0.99, ("geometry", "effective_rank"): 40.5 + noise,
                    },
                )  # fmt: skip
    return study
