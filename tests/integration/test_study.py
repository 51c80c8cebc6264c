"""Whole studies on the embedded images: kill and restart, several ranks, failing methods, one-file methods."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
STUDY = {
    "name": "tiny",
    "datasets": ["fashion_mnist_mini"],
    "backbones": ["conv4"],
    "methods": ["random_init", "raw_pixels", {"name": "byol", "recipe": {"warmup_epochs": 0.0}}],
    "seeds": [0, 1],
    "budget": {"epochs": 1},
    "protocols": ["knn"],
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_study(folder, **changes):
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return path


def start(path, *arguments):
    command = [sys.executable, "-m", "ssl_bench.cli", "run", str(path), "--results", str(path.parent / "results")]
    return subprocess.Popen(
        [*command, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(path, *arguments, code=0):
    process = start(path, *arguments)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == code, output
    return output


def numbers(folder):
    """Everything in rows.csv but what measures time, memory or the machine."""
    rows = pd.read_csv(folder / "results" / "tiny" / "rows.csv", keep_default_na=False)
    measured = ["seconds", "images_per_second", "peak_memory_mb", "hardware", "commit", "row_id"]
    return rows.drop(columns=[name for name in measured if name in rows]).to_csv(index=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    output = run(write_study(folder))
    return folder, output


@pytest.mark.slow
def test_a_study_ends_in_its_leaderboard(uninterrupted):
    folder, output = uninterrupted
    study = folder / "results" / "tiny"
    for name in ("rows.csv", "leaderboard.csv", "leaderboard.md", "report.html", "comparisons.csv"):
        assert (study / name).stat().st_size
    assert "| # |" in output
    board = pd.read_csv(study / "leaderboard.csv")
    assert sorted(board["method"]) == ["byol", "random_init", "raw_pixels"]


@pytest.mark.slow
def test_a_finished_study_does_nothing_again_and_its_tables_are_byte_for_byte_the_same(uninterrupted):
    folder, _ = uninterrupted
    study = folder / "results" / "tiny"
    before = {path: path.read_bytes() for path in study.glob("*.*") if path.suffix in (".csv", ".md", ".html")}
    assert "5 already finished" in run(folder / "tiny.yaml")
    command = [sys.executable, "-m", "ssl_bench.cli", "leaderboard", "tiny", "--results", str(folder / "results")]
    subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_study_killed_three_times_ends_in_the_same_numbers(uninterrupted, tmp_path):
    path = write_study(tmp_path)
    rng = np.random.default_rng(int(time.time()))
    waits = rng.uniform(4, 14, 3).round(1).tolist()
    for wait in waits:
        process = start(path)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(2.5)  # orphaned trials notice that their runner is gone
    run(path)
    assert numbers(tmp_path) == numbers(uninterrupted[0]), f"killed after {waits} s"


@pytest.mark.slow
def test_sigterm_stops_cleanly_and_the_study_goes_on(uninterrupted, tmp_path):
    path = write_study(tmp_path)
    process = start(path)
    time.sleep(12)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (0, 130), output
    run(path)
    assert numbers(tmp_path) == numbers(uninterrupted[0])


@pytest.mark.slow
def test_a_new_protocol_is_run_without_pretraining_again(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    trials = folder / "results" / "tiny" / "trials"
    before = {path: path.stat().st_mtime_ns for path in trials.glob("*/pretrain.json")}
    run(write_study(folder, protocols=["knn", "spectrum"]))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(trials.glob("*/rows/spectrum.json"))) == 5
    write_study(folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["supervised"])
def test_two_processes_give_the_curve_of_one(method, tmp_path):
    """The same images, views and global batch, float32: only the order of sums differs.

    How fast that rounding grows is the dynamics' business: Adam turns gradients near zero into steps of full
    size, so that SimCLR under its own recipe is at 4e-4 after 20 steps. The exactness of every method's step
    is proven in float64 (tests/distributed).
    """
    curves = {}
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        budget = {"epochs": 1, "max_steps": 40}
        path = write_study(folder, methods=[method], seeds=[0], devices=devices, budget=budget, log_every_n_steps=1)
        run(path)
        (curve,) = (folder / "results" / "tiny" / "trials").glob("*/curve.csv")
        curves[devices] = pd.read_csv(curve)["train/loss"].to_numpy()[:20]
    assert len(curves[1]) == 20
    np.testing.assert_allclose(curves[2], curves[1], rtol=1e-4)


PLUGIN = '''
import torch
from ssl_bench.distributed import batch_mean
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.records import LossOutput, Recipe


class _Base(SSLMethod):
    recipes = {"small": Recipe(views="simclr", optimizer="adam", warmup_epochs=0.0, epochs=1, global_batch_size=128)}
    loss_is_sample_mean = True


@register_method("breaks_nan", family="test", version=1)
class BreaksNaN(_Base):
    """A loss that becomes NaN at step 3."""

    def loss(self, views, batch):
        value = batch_mean(self.backbone(views[0]))
        return LossOutput(value * (float("nan") if self.trainer.global_step == 3 else 1.0))


@register_method("breaks_raise", family="test", version=1)
class BreaksRaise(_Base):
    """A method with a bug."""

    def loss(self, views, batch):
        raise IndexError("a bug in the method")


@register_method("breaks_collapse", family="test", version=1)
class BreaksCollapse(_Base):
    """Every weight becomes zero, so every embedding is the same."""

    def loss(self, views, batch):
        return LossOutput(batch_mean(self.backbone(views[0])))

    def after_optimizer_step(self, step, num_steps):
        with torch.no_grad():
            for parameter in self.backbone.parameters():
                parameter.zero_()
'''


@pytest.mark.slow
def test_broken_methods_get_rows_and_the_study_goes_on(tmp_path):
    """As a package elsewhere would: through the entry-point group."""
    site = tmp_path / "site"
    (site / "broken_methods-1.dist-info").mkdir(parents=True)
    (site / "broken_methods-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken-methods\nVersion: 1\n"
    )
    (site / "broken_methods-1.dist-info" / "entry_points.txt").write_text(
        "[ssl_bench.methods]\nbroken = broken_methods\n"
    )
    (site / "broken_methods.py").write_text(PLUGIN)
    path = write_study(tmp_path, methods=["random_init", "breaks_nan", "breaks_raise", "breaks_collapse"], seeds=[0])
    ENVIRONMENT["PYTHONPATH"] = str(site)
    try:
        run(path, code=1)
    finally:
        del ENVIRONMENT["PYTHONPATH"]
    found = {}
    for status in (tmp_path / "results" / "tiny" / "trials").glob("*/status.json"):
        name = json.loads((status.parent / "trial.json").read_text())["method"]["name"]
        found[name] = json.loads(status.read_text())
    assert {name: state["status"] for name, state in found.items()} == {
        "random_init": "done", "breaks_nan": "diverged", "breaks_raise": "failed", "breaks_collapse": "collapsed",
    }  # fmt: skip
    assert found["breaks_nan"]["step"] == 3
    assert "a bug in the method" in found["breaks_raise"]["reason"]
    rows = pd.read_csv(tmp_path / "results" / "tiny" / "rows.csv")
    assert set(rows["status"]) == {"done", "diverged", "failed", "collapsed"}


@pytest.mark.slow
def test_a_method_is_one_file(tmp_path):
    """Scaffold, list, check and leaderboard in a copy of the package; no other file is touched."""
    copy = tmp_path / "checkout"
    for name in ("ssl_bench", "tests"):
        shutil.copytree(CHECKOUT / name, copy / name)
    shutil.copy(CHECKOUT / "pyproject.toml", copy)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(copy)}

    def bench(*arguments, code=0):
        command = [sys.executable, "-m", "ssl_bench.cli", *arguments]
        process = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout

    before = {path: path.read_bytes() for path in copy.rglob("*.py")}
    bench("new-method", "my_method")
    changed = {path for path in copy.rglob("*.py") if before.get(path) != path.read_bytes()}
    assert {path.name for path in changed} == {"my_method.py", "test_my_method.py"}
    assert "my_method" in bench("list", "methods")
    report = json.loads(bench("check", "my_method", "--fast", "--json", code=1))
    statuses = {result["point"]: result["status"] for result in report["my_method"]}
    assert statuses == {1: "pass", 2: "pass", 3: "fail", 4: "pass", 5: "pass", 6: "pass", 7: "skip"}, report
    path = write_study(tmp_path, methods=[{"name": "my_method", "recipe": {"warmup_epochs": 0.0}}], seeds=[0])
    bench("run", str(path), "--results", str(tmp_path / "results"))
    assert "my_method" in (tmp_path / "results" / "tiny" / "leaderboard.md").read_text()


@pytest.mark.slow
def test_trackers_have_one_run_a_trial_and_wandb_is_offline_without_network(tmp_path):
    methods = [{"name": "supervised", "recipe": {"warmup_epochs": 0.0}}]
    trackers, budget = ["wandb", "tensorboard"], {"epochs": 1, "max_steps": 20}
    path = write_study(tmp_path, methods=methods, seeds=[0], budget=budget, loggers=trackers)
    ENVIRONMENT["WANDB_MODE"] = "offline"
    try:
        run(path)
    finally:
        del ENVIRONMENT["WANDB_MODE"]
    (trial,) = (tmp_path / "results" / "tiny" / "trials").iterdir()
    (folder,) = (trial / "wandb").glob("offline-run-*")
    assert folder.name.endswith(trial.name), "the run's id is the trial's, so that a retry goes on in it"
    assert list((trial / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_continued_and_regularized_trials_are_rows_of_their_own(tmp_path):
    variance = {"name": "variance", "weight": 0.1}
    methods = [
        {"name": "byol"},
        {"name": "byol", "init_from": "byol"},
        {"name": "byol", "regularizers": [variance]},
        {"name": "simclr", "init_from": "byol"},
    ]
    methods = [{**method, "recipe": {"warmup_epochs": 0.0}} for method in methods]
    run(write_study(tmp_path, methods=methods, budget={"epochs": 1, "max_steps": 5}, seeds=[0]))
    rows = pd.read_csv(tmp_path / "results" / "tiny" / "rows.csv", keep_default_na=False)
    byol = rows[(rows["method"] == "byol") & (rows["metric"] == "top1_k20")]
    assert set(zip(byol["regularizers"], byol["variant"], strict=True)) == {
        ("", "continued=false"),
        ("", "continued=true"),
        ("variance", ""),
    }
    assert "started from the whole state of trial" in byol.set_index("variant")["trial_note"]["continued=true"]
    assert "started from the backbone of trial" in rows[rows["method"] == "simclr"]["trial_note"].iloc[0]
