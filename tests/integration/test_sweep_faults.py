"""Runners and trials that are stopped, killed, started twice, or whose ranks fail."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import yaml

pytestmark = pytest.mark.slow

STUDY = {
    "name": "faults",
    "datasets": ["fashion_mnist_mini"],
    "backbones": ["conv4"],
    "methods": [{"name": "supervised", "recipe": {"warmup_epochs": 0.0}}],
    "seeds": [0],
    "budget": {"epochs": 1, "max_steps": 20},
    "protocols": ["knn"],
}
LONG = {"epochs": 100}

SLOW_AND_BROKEN = '''
import os
import time
from ssl_bench.distributed import batch_mean, rank
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.records import LossOutput, Recipe


class _Base(SSLMethod):
    recipes = {"small": Recipe(views="simclr", optimizer="adam", warmup_epochs=0.0, epochs=1, global_batch_size=128)}
    loss_is_sample_mean = True

    def loss(self, views, batch):
        self.disturb(self.trainer.global_step)
        return LossOutput(batch_mean(self.backbone(views[0])) * self.factor)

    factor = 1.0


@register_method("nan_on_rank_one", family="test", version=1)
class NaNOnRankOne(_Base):
    """One rank alone sees a NaN at step 3."""

    def disturb(self, step):
        self.factor = float("nan") if step == 3 and rank() == 1 else 1.0


@register_method("killed_once", family="test", version=1)
class KilledOnce(_Base):
    """Its process dies at step 3, the first time."""

    def disturb(self, step):
        marker = os.environ["SSL_BENCH_TEST_MARKER"]
        if step == 3 and not os.path.exists(marker):
            open(marker, "x").close()
            os.kill(os.getpid(), 9)


@register_method("killed_always", family="test", version=1)
class KilledAlways(_Base):
    """Its process dies at step 3."""

    def disturb(self, step):
        if step == 3:
            os.kill(os.getpid(), 9)
'''


class Bench:
    """The command line on one study in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.results = folder / "results"
        self.study = self.results / "faults"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "SSL_BENCH_TEST_MARKER": str(folder / "marker")}

    def write(self, **changes):
        (self.folder / "faults.yaml").write_text(yaml.safe_dump({**STUDY, **changes}))

    def install_methods(self):
        """As a package elsewhere would bring them: through the entry-point group."""
        info = self.folder / "site" / "faulty-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[ssl_bench.methods]\nfaulty = faulty\n")
        (self.folder / "site" / "faulty.py").write_text(SLOW_AND_BROKEN)
        self.environment["PYTHONPATH"] = str(self.folder / "site")

    def start(self, *arguments):
        command = [sys.executable, "-m", "ssl_bench.cli", "run", str(self.folder / "faults.yaml")]
        return subprocess.Popen(
            [*command, "--results", str(self.results), *arguments],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self, process, code):
        output, _ = process.communicate(timeout=400)
        assert process.returncode == code, output
        return output

    def statuses(self):
        found = {}
        for path in sorted(self.study.glob("trials/*/status.json")):
            config = json.loads((path.parent / "trial.json").read_text())
            found[config["method"]["name"], config["seed"]] = json.loads(path.read_text())
        return found

    def wait_for(self, pattern, seconds=240):
        """Wait until a file appears below the study."""
        end = time.monotonic() + seconds
        while not list(self.study.glob(pattern)):
            assert time.monotonic() < end, f"no {pattern} within {seconds} s"
            time.sleep(0.2)

    def processes(self):
        """Command lines of live processes that name the results folder or were started by a runner in it."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    ours = str(self.folder / "marker").encode() in file.read()
                with open(f"/proc/{entry}/stat") as file:
                    dead = file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if ours and not dead:
                found.append(entry)
        return found


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def rows_of(bench):
    rows = pd.read_csv(bench.study / "rows.csv", keep_default_na=False)
    return rows.drop(columns=["row_id", "seconds", "images_per_second", "peak_memory_mb"]).to_csv(index=False)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_runner_leaves_no_process_behind_and_its_trials_go_on(bench, devices):
    bench.write(devices=devices, budget=LONG)
    process = bench.start()
    bench.wait_for("trials/*/trial.log")
    time.sleep(12)  # into training
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while bench.processes() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not bench.processes()
    assert {state["status"] for state in bench.statuses().values()} == {"running"}
    bench.write(devices=devices)  # a shorter budget is another trial; the table shows the study as it is now
    bench.finish(bench.start(), 0)
    assert "1 " in (bench.study / "leaderboard.md").read_text()
    assert len(pd.read_csv(bench.study / "leaderboard.csv")) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_saves_a_checkpoint_and_stops_everything(bench, devices):
    """As a terminal sends it: to every process of the group."""
    bench.write(devices=devices, budget=LONG)
    process = bench.start()
    bench.wait_for("trials/*/trial.log")
    time.sleep(25)  # into training: ranks import for themselves
    os.killpg(process.pid, signal.SIGINT)
    output = bench.finish(process, 130)
    assert "Stopped" in output
    assert "Traceback" not in output
    assert not bench.processes()
    (state,) = bench.statuses().values()
    assert state["status"] == "pending", state
    assert list(bench.study.glob("trials/*/checkpoints/last.ckpt")), state


def test_two_runners_on_one_folder_train_each_trial_once(bench):
    bench.write(seeds=[0, 1, 2])
    first, second = bench.start("--jobs", "1"), bench.start("--jobs", "1")
    bench.finish(first, 0)
    bench.finish(second, 0)
    assert {state["status"] for state in bench.statuses().values()} == {"done"}
    logs = [path.read_text() for path in bench.study.glob("trials/*/trial.log")]
    assert len(logs) == 3
    assert [log.count("`max_steps=20` reached") for log in logs] == [1, 1, 1]


def test_a_nan_on_one_rank_is_a_diverged_trial_with_its_step(bench):
    bench.install_methods()
    bench.write(methods=["nan_on_rank_one"], devices=2)
    bench.finish(bench.start(), 1)
    state = bench.statuses()["nan_on_rank_one", 0]
    assert (state["status"], state["step"]) == ("diverged", 3), state


def test_a_process_that_dies_is_started_again_once(bench):
    bench.install_methods()
    bench.write(methods=["killed_once", "killed_always"])
    output = bench.finish(bench.start("--jobs", "1"), 1)
    assert "it is started again" in output
    assert "--retry-broken" in output
    states = bench.statuses()
    assert states["killed_once", 0]["status"] == "done"
    assert states["killed_always", 0]["status"] == "failed"
    assert "SIGKILL, 2 times" in states["killed_always", 0]["reason"]


def test_a_results_folder_that_cannot_be_written_is_one_clear_line(bench):
    bench.write()
    bench.results.write_text("a file where the folder should be")
    output = bench.finish(bench.start(), 2)
    assert output.count("\n") == 1, output
    assert "must be writable" in output
