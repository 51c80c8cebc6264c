"""Study files: strict, with errors that name the file, the key and the nearest valid name."""

import subprocess
import sys

import pytest
import yaml

from ssl_bench.config import TrialConfig, load_study, parse_study
from ssl_bench.errors import ConfigError
from ssl_bench.sweep.plan import plan

GOOD = {
    "name": "study",
    "datasets": ["fashion_mnist_mini"],
    "backbones": ["conv4"],
    "methods": ["simclr", "random_init", "raw_pixels"],
    "seeds": [0, 1],
    "protocols": ["knn"],
}


def study(**changes):
    return parse_study({**GOOD, **changes}, where="study.yaml")


def trials(**changes):
    return plan(study(**changes))


def test_trials_are_datasets_times_methods_times_seeds_and_pixels_run_once():
    names = [(t.method["name"], t.seed) for t in trials()]
    assert names == [("simclr", 0), ("simclr", 1), ("random_init", 0), ("random_init", 1), ("raw_pixels", 0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methds": []}, r"Unknown key 'methds' in study\.yaml\. Did you mean 'methods'\?"),
        ({"methods": ["simclrr"]}, r"Unknown method 'simclrr'\. Did you mean 'simclr'\?.*study\.yaml"),
        ({"datasets": ["fashion_mnist_min"]}, r"Unknown dataset.*Did you mean 'fashion_mnist_mini'"),
        ({"protocols": ["kn"]}, r"Unknown protocol.*Did you mean 'knn'"),
        ({"backbones": ["conv44"]}, r"Unknown backbone.*Did you mean 'conv4'"),
        ({"methods": [{"name": "simclr", "argument": {}}]}, r"Unknown key 'methods\.0\.argument'.* 'arguments'"),
        ({"budget": {"epoch": 3}}, r"Unknown key 'budget\.epoch'.*Did you mean 'epochs'"),
        ({"budget": {"epochs": 0}}, r"greater than or equal to 1, got 0 \(budget\.epochs in study\.yaml\)"),
        ({"seeds": [1, 1]}, r"seeds must be distinct.*\(seeds in study\.yaml\)"),
        ({"seeds": []}, r"seeds"),
        ({"precision": "8bit"}, r"precision"),
        ({"name": "../outside"}, r"name"),
    ],
)  # fmt: skip
def test_a_wrong_study_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        study(**changes)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"arguments": {"temprature": 0.1}}, r"Unknown argument 'temprature' of method 'simclr'\. .*'temperature'"),
        ({"arguments": {"temperature": "hot"}}, r"temperature of method 'simclr'.*got 'hot'"),
        ({"recipe": {"base_rl": 1}}, r"Unknown recipe key 'base_rl'.*Did you mean 'base_lr'"),
        ({"recipe": {"optimizer": "sdg"}}, r"optimizer must be sgd"),
        ({"recipe": {"base_lr": -1.0}}, r"base_lr must be >= 0"),
        ({"views": {"crop_scal": [0.1, 1]}}, r"Unknown setting 'crop_scal' of the view.*Did you mean 'crop_scale'"),
        ({"backbone": {"name": "conv4", "arguments": {"widht": 3}}}, r"Unknown argument 'widht'.*'width'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_before_anything_runs(method, message):
    with pytest.raises(ConfigError, match=message):
        trials(methods=[{"name": "simclr", **method}])


def test_a_trial_that_stands_there_twice_is_refused():
    with pytest.raises(ConfigError, match="stands there twice"):
        trials(methods=["simclr", "simclr"])


def test_identity_changes_with_what_changes_numbers_and_with_nothing_else():
    def ids(**changes):
        return {trial.id for trial in trials(methods=["simclr"], seeds=[0], **changes)}

    base = ids()
    assert ids(devices=2) == ids(num_workers=0) == ids(protocols=["linear"]) == ids(log_every_n_steps=1) == base
    assert ids(online_knn_epochs=1) == ids(eigenmode_steps=5) == base
    assert ids(budget={"epochs": 3}) != base
    assert ids(precision="bf16-mixed") != base
    assert {t.id for t in trials(methods=["simclr"], seeds=[1])} != base
    for change in (
        {"arguments": {"temperature": 0.3}},
        {"recipe": {"base_lr": 0.5}},
        {"views": {"flip_probability": 0.0}},
    ):
        assert {t.id for t in trials(methods=[{"name": "simclr", **change}], seeds=[0])} != base


def test_trials_survive_json():
    for trial in trials():
        assert TrialConfig.from_json(trial.to_json()) == trial
        assert trial.same_as(yaml.safe_load(yaml.safe_dump(trial.to_json())))


def test_overrides_replace_single_entries(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    changed = load_study(path, ["budget.epochs=3", "seeds=[5]"])
    assert (changed.budget.epochs, changed.seeds) == (3, [5])
    with pytest.raises(ConfigError, match=r"must read key\.path=value"):
        load_study(path, ["budget.epochs"])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_study(tmp_path / "missing.yaml")
    (tmp_path / "torn.yaml").write_text("name: [")
    with pytest.raises(ConfigError, match=r"torn\.yaml must be valid YAML"):
        load_study(tmp_path / "torn.yaml")
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_study(tmp_path / "list.yaml")


def test_a_study_is_read_without_torch():
    code = "import sys; from ssl_bench.config import load_study; load_study('experiments/quickstart.yaml')"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)
