"""The command `ssl-bench check`: run the points, print the table, say with the exit status whether all passed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from ssl_bench.checking import points, training
from ssl_bench.checking.distributed import compare_ranks
from ssl_bench.checking.points import PointResult, run_point
from ssl_bench.errors import ConfigError
from ssl_bench.methods import METHODS

REFERENCE_TESTS = Path(__file__).parents[2] / "tests" / "reference"
RANK_TOLERANCE = 1e-5  # relative, in float64: what reordered sums of a normalized network may differ by
NOTHING = "nothing is trained"
TITLES = ("builds", "loss", "oracle", "ranks", "resume", "embed", "learns")


def main(arguments: argparse.Namespace) -> int:
    """Check the named methods; 0 when no point failed."""
    names = METHODS.names() if arguments.all else [METHODS.entry(name).name for name in arguments.methods]
    if not names:
        raise ConfigError("Name the methods to check, or pass --all.")
    started = time.perf_counter()
    results = check_methods(names, fast=arguments.fast)
    seconds = time.perf_counter() - started
    failed = sum(result.status == "fail" for row in results.values() for result in row)
    if arguments.json:
        print(json.dumps({name: [vars(result) for result in row] for name, row in results.items()}, indent=2))
    else:
        _print_table(results)
        print(f"{len(names)} methods, {failed} failed points, {seconds:.0f} s")
    return 1 if failed else 0


def check_methods(names: list[str], *, fast: bool) -> dict[str, list[PointResult]]:
    """Results of every point for each method, in point order."""
    oracles = check_oracles(names)
    trainable = [name for name in names if METHODS.get(name).trainable]
    errors = compare_ranks(trainable) if trainable else {}
    workers = min(len(names), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_prepare) as pool:
        alone = dict(zip(names, pool.map(partial(check_alone, fast=fast), names), strict=True))
    nothing = PointResult(4, "skip", NOTHING)
    ranks = {name: rank_result(errors[name]) if name in errors else nothing for name in names}
    return {name: sorted([*alone[name], oracles[name], ranks[name]], key=lambda r: r.point) for name in names}


def check_alone(name: str, *, fast: bool) -> list[PointResult]:
    """Every point of a method that needs neither the test suite nor other ranks."""
    dataset = points.small_dataset()
    row = [run_point(1, points.check_builds, name, dataset), run_point(6, points.check_embedding, name, dataset)]
    if not METHODS.get(name).trainable:
        return row + [PointResult(point, "skip", NOTHING) for point in (2, 5, 7)]
    row += [run_point(2, points.check_loss, name, dataset), run_point(5, training.check_resume, name, dataset)]
    if fast:
        return [*row, PointResult(7, "skip", "left out by --fast")]
    return [*row, run_point(7, training.check_learns, name, dataset)]


def _prepare() -> None:
    """One core a process, and only the table on the screen."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def rank_result(error: float | str) -> PointResult:
    """Point 4 from the largest relative error over value and gradients, or a message."""
    if isinstance(error, str):
        return PointResult(4, "fail", error)
    status = "pass" if error <= RANK_TOLERANCE else "fail"
    return PointResult(4, status, f"relative error {error:.1e}")


def check_oracles(names: list[str]) -> dict[str, PointResult]:
    """Point 3: one pytest process runs the reference test file of every method."""
    files = {name: REFERENCE_TESTS / f"test_{name}.py" for name in names}
    results = {
        name: PointResult(3, "fail", f"no oracle test tests/reference/test_{name}.py")
        for name, file in files.items()
        if not file.exists()
    }
    if not REFERENCE_TESTS.is_dir():
        return {name: PointResult(3, "skip", "the oracle tests are only in a source checkout") for name in names}
    present = [str(file) for name, file in files.items() if name not in results]
    if not present:
        return results
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *present]
        process = subprocess.run(command, cwd=REFERENCE_TESTS.parents[1], capture_output=True, text=True, check=False)
        if not report.exists():
            return {name: PointResult(3, "fail", f"pytest did not run: {process.stderr[-300:]}") for name in names}
        cases = list(ElementTree.parse(report).iter("testcase"))
    for name in files:
        if name in results:
            continue
        own = [case for case in cases if f"test_{name}" in case.get("classname", "").split(".")]
        bad = [
            case.get("name", "?") for case in own if case.find("failure") is not None or case.find("error") is not None
        ]
        ran = [case for case in own if case.find("skipped") is None]
        if bad:
            results[name] = PointResult(3, "fail", f"{len(bad)} of {len(own)} tests fail: {bad[0]}")
        elif not ran:
            results[name] = PointResult(3, "fail", f"tests/reference/test_{name}.py ran no test")
        else:
            results[name] = PointResult(3, "pass", f"{len(ran)} tests")
    return results


def _print_table(results: dict[str, list[PointResult]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", *(f"{i} {title}" for i, title in enumerate(TITLES, 1)), title="ssl-bench check")
    marks = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "skip": "[dim]-[/]"}
    for name, row in results.items():
        table.add_row(name, *(marks[result.status] for result in row))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for name, row in results.items():
        for result in row:
            if result.status == "skip":
                reasons.setdefault(f"point {result.point}: {result.detail}", []).append(name)
            elif result.status == "fail" or result.point == 7:
                console.print(f"{name} {result.point} {TITLES[result.point - 1]}: {result.detail}", markup=False)
    for reason, names in reasons.items():
        console.print(f"skipped, {reason} ({len(names)} methods)", markup=False)
