import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from ssl_bench.errors import StoreError
from ssl_bench.results import store
from ssl_bench.results.rows import COLUMNS, Row, collect_rows, read_rows, rows_text
from ssl_bench.results.trial import read_trial, read_trials

from .synthetic import dump, metric_row, write_study, write_trial


def only(rows, **facts):
    found = [row for row in rows if all(getattr(row, key) == value for key, value in facts.items())]
    assert len(found) == 1, found
    return found[0]


def test_row_carries_identity_cost_and_provenance(tmp_path):
    value = 0.1 + 0.2
    write_trial(tmp_path, "t0", seed=3, values={("linear", "top1"): value}, protocols=("linear",))
    row = only(collect_rows(tmp_path))
    assert row.row_id
    assert dataclasses.replace(row, row_id="") == Row(
        study=tmp_path.name, trial="t0", dataset="fashion_mnist_mini", method="simclr", family="contrastive",
        method_version=1, uses_labels=False, backbone="conv4", seed=3, epochs=8.0, global_batch_size=128,
        precision="32-true", protocol="linear", protocol_version=1, metric="top1", split="test", value=value,
        higher_is_better=True, n_test=2000, selected_on="validation", status="done", seconds=75.0,
        images_per_second=1050.25, peak_memory_mb=310.5, parameters=1_234_567, backbone_parameters=98_765,
        recipe_source="ours", commit="0123abc", torch_version="2.14.1", lightning_version="2.6.6",
        versions='{"lightning":"2.6.6","torch":"2.14.1"}', hardware="2 CPU cores",
    )  # fmt: skip


def test_family_falls_back_to_the_registry(tmp_path):
    folder = write_trial(tmp_path, "t0", values={("linear", "top1"): 0.8})
    config = json.loads((folder / "trial.json").read_text())
    del config["method"]["family"], config["method"]["uses_labels"]
    dump(folder / "trial.json", config)
    row = collect_rows(tmp_path)[0]
    assert (row.family, row.uses_labels) == ("contrastive", None)


@pytest.mark.parametrize("status", ["failed", "diverged", "collapsed", "skipped"])
def test_trial_without_figures_has_a_row_for_each_protocol(tmp_path, status):
    write_trial(tmp_path, "t0", status=status, reason="out of memory at step 5")
    rows = collect_rows(tmp_path)
    assert [row.protocol for row in rows] == ["knn", "linear"]
    for row in rows:
        assert (row.value, row.metric, row.status, row.reason) == (None, "", status, "out of memory at step 5")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'[{"protocol": "linear"',
        b"{}{}",
        b"[1]",
        b'[{"protocol": "linear"}]',
        json.dumps([metric_row("linear", "top1", 0.5)] * 2).encode(),
        json.dumps([metric_row("linear", "top1", 0.5, unknown=1)]).encode(),
        json.dumps([metric_row("linear", "top1", "0.5")]).encode(),
        json.dumps([metric_row("linear", "top1", float("nan"))]).encode(),
    ],
)
def test_torn_row_file_is_a_missing_row_with_a_reason(tmp_path, content):
    folder = write_trial(tmp_path, "t0", values={("linear", "top1"): 0.8, ("knn", "top1_k20"): 0.7})
    (folder / "rows" / "linear.json").write_bytes(content)
    rows = collect_rows(tmp_path)
    assert only(rows, protocol="knn").value == 0.7
    bad = only(rows, protocol="linear")
    assert (bad.value, bad.status) == (None, "missing")
    assert "linear.json" in bad.reason
    assert bad.trial_status == "done"


def test_leftover_of_a_killed_writer_is_ignored(tmp_path):
    folder = write_trial(tmp_path, "t0", values={("linear", "top1"): 0.8}, protocols=("linear",))
    (folder / "rows" / ".linear.json.host~1~00000000.tmp").write_text("[{")
    (tmp_path / "trials" / "half-made").mkdir()
    assert len(collect_rows(tmp_path)) == 1


@pytest.mark.parametrize("name", ["trial.json", "status.json", "pretrain.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"a"', b"\xff"])
def test_torn_trial_files_never_crash_and_say_so(tmp_path, name, content):
    folder = write_trial(tmp_path, "t0", values={("linear", "top1"): 0.8})
    (folder / name).write_bytes(content)
    record = read_trial(folder)
    assert name in record.reason
    assert record.status == ("done" if name == "pretrain.json" else "unreadable")
    rows = collect_rows(tmp_path)
    assert all(name in row.reason for row in rows)
    assert read_back(rows, tmp_path) == rows


@pytest.mark.parametrize("key", ["dataset", "method", "backbone", "budget", "seed"])
def test_trial_without_identity_is_unreadable(tmp_path, key):
    folder = write_trial(tmp_path, "t0")
    config = json.loads((folder / "trial.json").read_text())
    del config[key]
    dump(folder / "trial.json", config)
    row = only(collect_rows(tmp_path))
    assert (row.trial, row.method, row.status) == ("t0", "", "unreadable")
    assert key in row.reason


def test_folder_without_trials_is_a_clear_error(tmp_path):
    with pytest.raises(StoreError, match="ssl-bench run"):
        read_trials(tmp_path)


def read_back(rows, tmp_path):
    store.write_text(tmp_path / "rows.csv", rows_text(rows))
    return read_rows(tmp_path / "rows.csv")


def test_csv_round_trip_is_exact(tmp_path):
    write_study(tmp_path, seeds=2)
    rows = collect_rows(tmp_path)
    nasty = dataclasses.replace(rows[0], note='a,"b"\r\n\tc|d ü', value=5e-324, reason=" x ")
    rows = [nasty, *rows]
    assert read_back(rows, tmp_path) == rows


def test_pandas_reads_the_same_values(tmp_path):
    write_study(tmp_path, seeds=2)
    rows = collect_rows(tmp_path)
    store.write_text(tmp_path / "rows.csv", rows_text(rows))
    frame = pd.read_csv(tmp_path / "rows.csv", float_precision="round_trip")
    assert list(frame.columns) == list(COLUMNS)
    np.testing.assert_array_equal(frame["value"].to_numpy(), np.array([row.value for row in rows], dtype=float))


def test_read_rows_refuses_another_table(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StoreError, match="ssl-bench leaderboard"):
        read_rows(tmp_path / "rows.csv")


def test_row_id_changes_with_any_field(tmp_path):
    write_trial(tmp_path, "t0", values={("linear", "top1"): 0.8}, protocols=("linear",))
    first = only(collect_rows(tmp_path))
    dump(tmp_path / "trials" / "t0" / "rows" / "linear.json", [metric_row("linear", "top1", 0.8, note="x")])
    assert only(collect_rows(tmp_path)).row_id != first.row_id
    dump(tmp_path / "trials" / "t0" / "rows" / "linear.json", [metric_row("linear", "top1", 0.8)])
    assert only(collect_rows(tmp_path)).row_id == first.row_id


def test_same_method_with_other_arguments_is_a_variant(tmp_path):
    for index, arguments in enumerate([{"temperature": 0.2}, {"temperature": 0.2}, {"temperature": 0.5}, {}]):
        write_trial(tmp_path, f"t{index}", seed=index, arguments=arguments, values={("linear", "top1"): 0.8})
    write_trial(tmp_path, "other", method="byol", arguments={"temperature": 0.9}, values={("linear", "top1"): 0.8})
    variants = {row.trial: row.variant for row in collect_rows(tmp_path)}
    assert variants == {
        "t0": "temperature=0.2", "t1": "temperature=0.2", "t2": "temperature=0.5", "t3": "temperature=default",
        "other": "",
    }  # fmt: skip


def test_protocol_versions_and_arguments_get_columns_of_their_own(tmp_path):
    write_trial(tmp_path, "t0", seed=0, values={("linear", "top1"): 0.8})
    folder = write_trial(tmp_path, "t1", seed=1)
    dump(folder / "rows" / "linear.json", [metric_row("linear", "top1", 0.9, protocol_version=2)])
    columns = {row.trial: row.column for row in collect_rows(tmp_path) if row.metric}
    assert columns == {"t0": "linear[version=1]/top1", "t1": "linear[version=2]/top1"}


def test_order_does_not_depend_on_the_file_system(tmp_path):
    write_study(tmp_path, seeds=2)
    trials = read_trials(tmp_path)
    assert collect_rows(tmp_path, trials[::-1]) == collect_rows(tmp_path, trials)


def test_study_json_names_the_study(tmp_path):
    write_trial(tmp_path, "t0")
    dump(tmp_path / "study.json", {"name": "quickstart", "command": "ssl-bench run experiments/quickstart.yaml"})
    assert {row.study for row in collect_rows(tmp_path)} == {"quickstart"}


def test_curve_skips_gaps_and_survives_a_torn_file(tmp_path):
    folder = write_trial(tmp_path, "t0", curve=False)
    (folder / "curve.csv").write_text("step,epoch,train/loss,probe/top1\n0,0.0,3.5,\n5,0.5,nan,0.7\n10,1.0,2.5,0.8\n")
    assert read_trial(folder).curve() == {
        "train/loss": [(0.0, 3.5), (1.0, 2.5)],
        "probe/top1": [(0.5, 0.7), (1.0, 0.8)],
    }
    (folder / "curve.csv").write_text("step,epoch,train/loss\n0,0.0")
    assert read_trial(folder).curve() == {}


def test_changed_views_are_a_variant_of_their_own(tmp_path):
    for seed, overrides in enumerate(({}, {"style_area": [0.02, 1.0]})):
        folder = write_trial(tmp_path, f"t{seed}", seed=0, protocols=("linear",), values={("linear", "top1"): 0.5})
        config = json.loads((folder / "trial.json").read_text())
        config["views"] = {"name": "simclr", "specs": [], "overrides": overrides}
        dump(folder / "trial.json", config)
    variants = {row.variant for row in collect_rows(tmp_path)}
    assert variants == {"views.style_area=default", "views.style_area=[0.02,1.0]"}
