"""A study through a real Slurm of one node, disturbed in every way a cluster knows, ends as undisturbed."""

import json
import socket
import subprocess
import time

import pytest

from ssl_bench.results.trial import progress
from tests import slurm_cluster
from tests.integration.test_study import numbers, run, start, write_study

REASON = slurm_cluster.reason_against()
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.skipif(bool(REASON), reason=REASON)]
SLURM = {"gpus": False, "cpus_per_task": 1, "poll_seconds": 1, "time_minutes": 20, "signal_seconds": 20}
METHODS = ["random_init", {"name": "byol", "recipe": {"warmup_epochs": 0.0}}]
NODE = socket.gethostname().split(".")[0]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    try:
        slurm_cluster.start()
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        pytest.skip(f"Slurm does not start here: {error}")


def write(folder, **changes):
    return write_study(folder, methods=METHODS, seeds=[0, 1, 2], slurm=SLURM, budget={"epochs": 4}, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    run(write(folder))
    return numbers(folder)


def command(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def trials(folder):
    """Trial -> Slurm job of the trained trials."""
    study = folder / "results" / "tiny"
    queued = json.loads((study / "slurm.json").read_text()) if (study / "slurm.json").exists() else {}
    names = {path.parent.name: json.loads(path.read_text())["method"]["name"] for path in study.glob("*/*/trial.json")}
    return {trial: job for trial, job in queued.items() if names.get(trial) == "byol"}


def wait_for(condition, process=None, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.3)


def state(job):
    text = subprocess.run(["squeue", "--noheader", "--format=%T", f"--jobs={job}"], capture_output=True, text=True)
    return text.stdout.strip()


def training(folder):
    """Trials that are past their first steps and not past half of them."""
    found = []
    for trial, job in trials(folder).items():
        path = folder / "results" / "tiny" / "trials" / trial
        status = json.loads((path / "status.json").read_text()) if (path / "status.json").exists() else {}
        step, steps = progress(path) or (0, 1)
        if status.get("status") == "running" and 0 < step < steps / 2 and state(job) == "RUNNING":
            found.append((trial, job))
    return found


def in_the_middle(folder, process=None):
    """Slurm job of a trial that has trained for some seconds and goes on."""
    chosen = []

    def found():
        before = training(folder)
        time.sleep(1)
        chosen[:] = [job for trial, job in training(folder) if (trial, job) in before]
        return bool(chosen)

    wait_for(found, process)
    return chosen[0]


@pytest.mark.timeout(1500)  # Slurm holds a requeued job back for about two minutes
def test_disturbed_study_equals_the_local_one(tmp_path, undisturbed):
    path = write(tmp_path)
    runner = start(path, "--launcher", "slurm")
    # 1: an administrator requeues a job in the middle of its training
    command("scontrol", "requeue", in_the_middle(tmp_path, runner))
    # 2: the node is drained while jobs wait, and comes back
    command("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=test")
    time.sleep(2)
    command("scontrol", "update", f"nodename={NODE}", "state=resume")
    # 3: the runner dies; what is queued goes on without it
    runner.kill()
    runner.communicate()
    # 4: Slurm says that the time is nearly up; the job saves, and asks to be requeued
    job = in_the_middle(tmp_path)
    before = trials(tmp_path)
    with subprocess.Popen(["scancel", "--signal=USR2", job]) as asking:
        wait_for(lambda: state(job) != "RUNNING")
        asking.kill()  # it asks on while the job is requeued
    # 5: a new runner finds the queue as it is
    runner = start(path, "--launcher", "slurm")
    job = in_the_middle(tmp_path, runner)
    assert trials(tmp_path) == before
    # 6: somebody cancels a job; the runner submits it once more
    command("scancel", job)
    output, _ = runner.communicate(timeout=500)
    assert runner.returncode == 0, output
    assert numbers(tmp_path) == undisturbed
    assert "trials are queued already" in output
    assert "ended early; it is submitted again" in output, output


def test_two_tasks_train_one_trial(tmp_path):
    run(write_study(tmp_path, methods=["supervised"], seeds=[0], devices=2, slurm=SLURM), "--launcher", "slurm")
    (facts,) = tmp_path.glob("results/tiny/trials/*/pretrain.json")
    assert json.loads(facts.read_text())["world_size"] == 2


def test_a_failing_rank_is_reported_as_its_own_reason(tmp_path):
    methods = [{"name": "supervised", "recipe": {"base_lr": 1e30, "warmup_epochs": 0.0}}]
    study = write_study(tmp_path, methods=methods, seeds=[0], devices=2, slurm=SLURM)
    output = run(study, "--launcher", "slurm", code=1)
    assert "diverged" in output


def test_settings_that_slurm_refuses_are_an_error(tmp_path):
    study = write_study(tmp_path, methods=["random_init"], slurm={**SLURM, "partition": "no_such_partition"})
    output = run(study, "--launcher", "slurm", code=2)
    assert "Slurm must accept the jobs" in output
    assert "Traceback" not in output
