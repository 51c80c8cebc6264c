import csv
import io
import json
import random
import re

import pytest

from ssl_bench.results.aggregate import columns_of, headline_columns, labels, make_cells, over_datasets, ranking_column
from ssl_bench.results.rows import collect_rows
from ssl_bench.results.statistics import summarize
from ssl_bench.results.tables import comparisons_csv, leaderboard_csv, leaderboard_md, leaderboard_tex, make_leaderboard

from .synthetic import dump, metric_row, write_study, write_trial


def board_of(study, **facts):
    return make_leaderboard(collect_rows(study), facts)


def lines_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def linear_trials(study, values, *, method="simclr", dataset="d", **facts):
    for seed, value in enumerate(values):
        write_trial(
            study, f"{method}-{dataset}-{seed}", method=method, dataset=dataset, seed=seed, protocols=("linear",),
            values={("linear", "top1"): value}, **facts,
        )  # fmt: skip


def test_csv_line_is_mean_std_and_interval_of_the_seeds(tmp_path):
    values = [0.701, 0.710, 0.694]
    linear_trials(tmp_path, values)
    [line] = lines_of(leaderboard_csv(board_of(tmp_path)))
    s = summarize(values)
    got = [float(line[f"linear/top1 {part}"]) for part in ("mean", "std", "ci_low", "ci_high")]
    assert got == [s.mean, s.std, s.low, s.high]
    assert got[3] - got[0] == pytest.approx(0.0199247873514, abs=1e-11)  # the statistics card's half-width
    assert (line["status"], line["num_seeds"], line["num_failed"], line["seeds"]) == ("done", "3", "0", "0 1 2")
    assert (line["seconds"], line["parameters"], line["recipe"]) == ("75.0", "1234567.0", "recipe from the card: ours")


@pytest.mark.parametrize("status", ["diverged", "collapsed"])
def test_broken_trials_are_counted_and_never_averaged(tmp_path, status):
    linear_trials(tmp_path, [0.8, 0.82])
    # a collapsed run may have been evaluated before its end was noticed
    write_trial(tmp_path, "bad", dataset="d", seed=2, status=status, reason="NaN", protocols=("linear",),
                values={("linear", "top1"): 0.1})  # fmt: skip
    board = board_of(tmp_path)
    [line] = lines_of(leaderboard_csv(board))
    assert float(line["linear/top1 mean"]) == summarize([0.8, 0.82]).mean
    assert (line["linear/top1 n"], line["num_seeds"], line["num_failed"]) == ("2", "3", "1")
    assert line["status"] == f"2 done, 1 {status}"
    assert f"seed 2 {status}: NaN" in line["notes"]
    text = leaderboard_md(board)
    assert "2/3, 1 failed" in text
    assert f"seed 2 {status}: NaN" in text


def test_figures_of_a_trial_that_failed_in_a_later_stage_count(tmp_path):
    write_trial(tmp_path, "t0", status="failed", reason="finetune ran out of memory",
                values={("linear", "top1"): 0.8}, protocols=("linear", "finetune"))  # fmt: skip
    [line] = lines_of(leaderboard_csv(board_of(tmp_path)))
    assert (line["linear/top1 mean"], line["num_failed"], line["status"]) == ("0.8", "1", "failed")


def test_cell_with_no_figure_at_all_stays_in_the_table_and_is_last(tmp_path):
    linear_trials(tmp_path, [0.8, 0.81])
    write_trial(tmp_path, "bad", dataset="d", method="byol", status="failed", reason="boom | crash\nline 2")
    lines = lines_of(leaderboard_csv(board_of(tmp_path)))
    assert [(line["method"], line["linear/top1 mean"] == "") for line in lines] == [("simclr", False), ("byol", True)]
    assert "boom \\| crash line 2" in leaderboard_md(board_of(tmp_path))


def test_one_seed_shows_no_interval_and_is_flagged(tmp_path):
    linear_trials(tmp_path, [0.8512])
    [line] = lines_of(leaderboard_csv(board_of(tmp_path)))
    assert (line["linear/top1 std"], line["linear/top1 ci_low"], line["linear/top1 n"]) == ("", "", "1")
    assert "| 85.1 (n = 1) |" in leaderboard_md(board_of(tmp_path))


def test_protocol_versions_never_share_a_column(tmp_path):
    linear_trials(tmp_path, [0.8, 0.9])
    dump(tmp_path / "trials" / "simclr-d-1" / "rows" / "linear.json",
         [metric_row("linear", "top1", 0.9, protocol_version=2)])  # fmt: skip
    [line] = lines_of(leaderboard_csv(board_of(tmp_path)))
    assert (line["linear[version=1]/top1 mean"], line["linear[version=1]/top1 n"]) == ("0.8", "1")
    assert (line["linear[version=2]/top1 mean"], line["linear[version=2]/top1 n"]) == ("0.9", "1")


def test_columns_come_in_reading_order(tmp_path):
    metrics = [("knn", "top1_k200"), ("knn", "top1_k20"), ("finetune", "top1"), ("linear", "top5"), ("linear", "top1"),
               ("clustering", "nmi")]  # fmt: skip
    write_trial(tmp_path, "t0", values=dict.fromkeys(metrics, 0.5), protocols=[])
    linear = [metric_row("linear", name, 0.5) for name in ("top5", "top1")]
    linear.append(metric_row("linear", "top1", 0.5, split="validation"))
    dump(tmp_path / "trials/t0/rows/linear.json", linear)
    columns = columns_of(collect_rows(tmp_path))
    assert columns == ["linear/top1", "linear/top5", "knn/top1_k20", "knn/top1_k200", "finetune/top1", "clustering/nmi",
                       "linear/top1@validation"]  # fmt: skip
    assert headline_columns(columns) == ["linear/top1", "knn/top1_k20", "knn/top1_k200", "finetune/top1"]
    assert ranking_column(columns) == "linear/top1"
    assert ranking_column(["clustering/nmi"]) == "clustering/nmi"
    assert ranking_column([]) is None


def test_markdown_is_sorted_and_marks_references(tmp_path):
    write_study(tmp_path)
    text = leaderboard_md(board_of(tmp_path, command="ssl-bench run experiments/quickstart.yaml"))
    order = re.findall(r"^\| (\d*) \|[^|]*\| (\S+) \|", text, flags=re.M)
    assert order == [("", "*supervised*"), ("1", "simclr"), ("2", "vicreg"), ("3", "byol"), ("4", "mae"),
                     ("", "*raw_pixels*"), ("", "*random_init*")]  # fmt: skip
    for fact in ("Student t interval", "selected on validation, 2000 test images", "Commit: 0123abc", "Seeds: 0, 1, 2",
                 "recipe from the card: ours", "Produced by: ssl-bench run experiments/quickstart.yaml",
                 "ssl-bench leaderboard"):  # fmt: skip
        assert fact in text


def test_places_and_comparisons_tell_clear_differences_only(tmp_path):
    noise = [0.0, 0.001, -0.001, 0.0005, -0.0004]
    for method, mean, wobble in (("a", 0.9, 1), ("b", 0.8, -1), ("c", 0.8005, 2), ("d", 0.5, 1)):
        linear_trials(tmp_path, [mean + wobble * x for x in noise], method=method)
    board = board_of(tmp_path)
    assert {cell.method: places for cell, places in board.places.items()} == {
        "a": (1, 1), "b": (2, 3), "c": (2, 3), "d": (4, 4),
    }  # fmt: skip
    assert "d: not separable from a at 5 %: none." in leaderboard_md(board)
    pairs = {(line["a"], line["b"]): line for line in lines_of(comparisons_csv(board))}
    assert len(pairs) == 6
    assert pairs["c", "b"]["separable"] == "false"
    assert pairs["a", "d"]["separable"] == "true"
    assert float(pairs["a", "d"]["difference"]) == pytest.approx(0.4)


def test_one_seed_separates_nothing(tmp_path):
    for method, mean in (("a", 0.9), ("b", 0.1)):
        linear_trials(tmp_path, [mean], method=method)
    board = board_of(tmp_path)
    assert set(board.places.values()) == {(1, 2)}
    assert "not separable from a at 5 %: b." in leaderboard_md(board)


def test_over_datasets_ranks_by_hand_and_scores_broken_runs_zero(tmp_path):
    table = [[0.80, 0.78, 0.75], [0.70, 0.72, 0.65], [0.90, 0.88, 0.85], [0.60, 0.61, 0.55], [0.95, 0.95, 0.90],
             [0.50, 0.48, 0.47]]  # fmt: skip
    for index, scores in enumerate(table):
        for method, score in zip("abc", scores, strict=True):
            linear_trials(tmp_path, [score], method=method, dataset=f"d{index}")
    result = over_datasets(make_cells(collect_rows(tmp_path)), "linear/top1")
    # the statistics card's rank example
    assert [(m.name, round(m.mean_rank, 9)) for m in result.methods] == [
        ("a", 1.416666667),
        ("b", 1.583333333),
        ("c", 3),
    ]
    assert result.friedman_p == pytest.approx(0.000848257603634, abs=1e-11)
    assert next(p.p for p in result.comparisons if (p.a, p.b) == ("a", "c")) == pytest.approx(0.03125)
    write_trial(tmp_path, "a-d0-0", method="a", dataset="d0", seed=0, status="collapsed")
    result = over_datasets(make_cells(collect_rows(tmp_path)), "linear/top1")
    broken = next(m for m in result.methods if m.name == "a")
    assert broken.n_failed == 1
    assert broken.mean_rank > 1.416666667
    assert "## Over datasets" in leaderboard_md(board_of(tmp_path))


def test_output_does_not_depend_on_row_order(tmp_path):
    write_study(tmp_path, datasets=("d1", "d2"), seeds=2)
    rows = collect_rows(tmp_path)
    shuffled = random.Random(0).sample(rows, len(rows))
    first, second = make_leaderboard(rows), make_leaderboard(shuffled)
    for render in (leaderboard_csv, leaderboard_md, comparisons_csv):
        assert render(first) == render(second)


def test_labels_name_what_differs(tmp_path):
    linear_trials(tmp_path, [0.8], method="a", backbone="conv4")
    linear_trials(tmp_path, [0.8], method="b", backbone="resnet18")
    assert sorted(labels(make_cells(collect_rows(tmp_path))).values()) == ["a (conv4)", "b (resnet18)"]
    write_trial(tmp_path, "a2", dataset="d", method="a", backbone="conv4", epochs=20)
    names = list(labels(make_cells(collect_rows(tmp_path))).values())
    assert sorted(names) == ["a (conv4, 20 epochs)", "a (conv4, 8 epochs)", "b (resnet18, 8 epochs)"]


def test_study_without_any_figure_still_has_tables(tmp_path):
    (tmp_path / "trials").mkdir()
    assert "No trial" in leaderboard_md(board_of(tmp_path))
    write_trial(tmp_path, "t0", status="failed", reason="boom")
    (tmp_path / "trials" / "t1").mkdir()
    (tmp_path / "trials" / "t1" / "trial.json").write_text("{")
    text = leaderboard_md(board_of(tmp_path))
    assert "seed 0 failed: boom" in text
    assert "trial t1 cannot be read" in text


def test_added_terms_are_named_and_compared_with_the_row_without(tmp_path):
    linear_trials(tmp_path, [0.70, 0.72, 0.71])
    for seed, value in enumerate([0.71, 0.74, 0.72]):
        folder = write_trial(
            tmp_path, f"with-{seed}", method="simclr", dataset="d", seed=seed, protocols=("linear",),
            values={("linear", "top1"): value},
        )  # fmt: skip
        config = json.loads((folder / "trial.json").read_text())
        config["method"]["regularizers"] = [
            {"name": "t_regs", "version": 1, "weight": 0.1, "layer": "projection", "start_epoch": 0, "arguments": {}}
        ]
        dump(folder / "trial.json", config)
    board = board_of(tmp_path)
    assert list(labels(board.tables["d"]).values()) == ["simclr + t_regs", "simclr"]
    text = leaderboard_md(board)
    # differences 1, 2 and 1 points: mean 4/3, t interval of their own
    assert re.search(r"\| simclr \+ t_regs \| simclr \| \+1\.33 \| \[-0\.10, \+2\.77\] \| 0\.057 \| 3 \|", text), text


def test_tex_holds_every_row_and_escapes_names(tmp_path):
    linear_trials(tmp_path, [0.70, 0.72], method="moco_v2", dataset="d_1")
    linear_trials(tmp_path, [0.5, 0.6], method="byol", dataset="d_1")
    text = leaderboard_tex(board_of(tmp_path))
    assert "moco\\_v2 & 71.0 $\\pm$ 1.4 \\\\" in text
    assert "byol & 55.0 $\\pm$ 7.1 \\\\" in text
    assert "\\caption{d\\_1: mean $\\pm$ standard deviation over 2 seeds.}" in text
    assert text.count("{") == text.count("}")
