"""The command `ssl-bench`. Nothing heavy is imported before a subcommand needs it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ssl_bench.errors import ConfigError, SSLBenchError

KINDS = ("methods", "datasets", "protocols", "backbones")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="ssl-bench", description="Benchmark self-supervised pretraining.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary)

    def results(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--results", type=Path, default=Path("results"), help="folder of all studies")

    run = add("run", "run what is unfinished of a study and build its tables")
    run.add_argument("study", type=Path, help="study file, such as experiments/quickstart.yaml")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as budget.epochs=1"
    )
    run.add_argument("--jobs", type=int, help="trials at once (default: one a core, or one a GPU)")
    run.add_argument("--launcher", choices=("local", "slurm"), default="local", help="where trials run")
    run.add_argument("--retry-broken", action="store_true", help="run failed, diverged and collapsed trials again")
    results(run)

    status = add("status", "show how far every trial of a study is")
    status.add_argument("study", help="study file or name")
    results(status)

    prune = add("prune", "name the trials that stand in no table of a study any more, and remove them if told to")
    prune.add_argument("study", help="study file or name")
    prune.add_argument("--yes", action="store_true", help="remove them")
    results(prune)

    for name, what in (("leaderboard", "and name the files"), ("report", "and name the page to open")):
        board = add(name, f"rebuild the tables, plots and report of a study from its folder, {what}")
        board.add_argument("study", help="study file or name")
        results(board)

    evaluate = add("evaluate", "judge one backbone with the harness's protocols")
    evaluate.add_argument("--backbone", required=True, help="folder of an exported backbone, or a backbone's name")
    evaluate.add_argument("--weights", type=Path, help="safetensors or torch file for a backbone given by name")
    evaluate.add_argument("--prefix", help="what stands before the backbone's names in the file (default: found)")
    evaluate.add_argument("--dataset", required=True, help="dataset name")
    evaluate.add_argument(
        "--dataset-argument", action="append", default=[], metavar="KEY=VALUE", help="such as path=photos"
    )
    evaluate.add_argument("--protocols", nargs="+", default=["linear", "knn"], help="protocol names")
    evaluate.add_argument(
        "--protocol-argument", action="append", default=[], metavar="PROTOCOL.KEY=VALUE", help="such as knn.ks=[5]"
    )
    evaluate.add_argument("--seed", type=int, default=0, help="seed of the protocols and of random weights")
    evaluate.add_argument("--json", action="store_true", help="print rows as JSON")

    check = add("check", "prove methods: oracle, ranks, resume, learning")
    check.add_argument("methods", nargs="*", help="methods to check")
    check.add_argument("--all", action="store_true", help="check every registered method")
    check.add_argument("--fast", action="store_true", help="leave out the short training run (point 7)")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")

    speed = add("speed", "measure this machine: views, steps and k-NN against bare floors")
    speed.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    speed.add_argument("--json", action="store_true", help="print JSON")

    new = add("new-method", "write a method file and the skeleton of its oracle test")
    new.add_argument("name", help="registry key, such as my_method")

    listing = add("list", "list what is registered")
    listing.add_argument("kind", choices=KINDS)
    style = listing.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON")
    style.add_argument("--markdown", action="store_true", help="print a Markdown table, as in the README")
    return root


def main(argv: list[str] | None = None) -> int:
    """Run a command; errors made by the user are one clear line and exit status 2."""
    arguments = parser().parse_args(argv)
    try:
        handler = globals()["_" + arguments.command.replace("-", "_")]
        return int(handler(arguments) or 0)
    except SSLBenchError as error:
        print(f"ssl-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _run(arguments: argparse.Namespace) -> int:
    from ssl_bench.config import load_study

    study = load_study(arguments.study, arguments.set)
    from ssl_bench.sweep.run import run_study

    command = shlex.join(["ssl-bench", "run", str(arguments.study), *(f"--set={item}" for item in arguments.set)])
    return run_study(
        study,
        results=arguments.results,
        command=command,
        launcher=arguments.launcher,
        jobs=arguments.jobs,
        retry_broken=arguments.retry_broken,
    )


def _study_folder(arguments: argparse.Namespace) -> Path:
    name: str = arguments.study
    if name.endswith((".yaml", ".yml")):
        from ssl_bench.config import load_study

        name = load_study(name).name
    return Path(arguments.results) / name


def _status(arguments: argparse.Namespace) -> int:
    from collections import Counter

    from ssl_bench.config import changed_versions
    from ssl_bench.results.rows import study_facts
    from ssl_bench.results.trial import is_locked, progress, read_trials

    folder = _study_folder(arguments)
    trials = read_trials(folder)
    present = study_facts(folder).get("trials", [trial.id for trial in trials])
    counts: Counter[str] = Counter()
    for trial in trials:
        if trial.id not in present:
            continue
        config: Any = trial.config
        status, detail = trial.status, " ".join(filter(None, (trial.stage, trial.reason)))
        changed = changed_versions(config) if config else []
        if changed:
            status, detail = "stale", f"{'; '.join(changed)}; the next run measures it anew"
        elif status == "running":
            status = "running" if is_locked(trial.folder) else "interrupted"
            steps = progress(trial.folder) if trial.stage == "pretrain" else None
            if steps:
                detail += f" step {steps[0]} of {steps[1]}"
        counts[status] += 1
        label = " / ".join(str(config.get(part, {}).get("name", "?")) for part in ("method", "backbone", "dataset"))
        print(f"{status:<11} {label} / seed {config.get('seed', '?')}  {detail}".rstrip())
    others = len(trials) - counts.total()
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    if others:
        print(f"{others} more of other forms of this study stand in no table; ssl-bench prune {folder.name} lists them")
    return 0 if set(counts) <= {"done", "skipped"} else 1


def _prune(arguments: argparse.Namespace) -> int:
    import shutil

    from ssl_bench.results.rows import study_facts
    from ssl_bench.results.trial import is_locked, read_trials

    folder = _study_folder(arguments)
    trials = read_trials(folder)
    present = study_facts(folder).get("trials", [trial.id for trial in trials])
    unused = [trial for trial in trials if trial.id not in present and not is_locked(trial.folder)]
    for trial in unused:
        config: Any = trial.config
        label = " / ".join(str(config.get(part, {}).get("name", "?")) for part in ("method", "backbone", "dataset"))
        print(f"{trial.id}  {trial.status:<11} {label} / seed {config.get('seed', '?')}")
        if arguments.yes:
            shutil.rmtree(trial.folder)
    what = "removed" if arguments.yes else "would be removed by --yes"
    print(f"{len(unused)} of {len(trials)} trials {what}; the others stand in the study's tables")
    return 0


def _leaderboard(arguments: argparse.Namespace) -> int:
    from ssl_bench.results.build import build_tables

    for path in build_tables(_study_folder(arguments)):
        print(path)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from ssl_bench.results.build import build_tables

    print(*(path for path in build_tables(_study_folder(arguments)) if path.suffix == ".html"))
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from ssl_bench.sweep.foreign import evaluate_backbone

    rows = evaluate_backbone(
        arguments.backbone,
        weights=arguments.weights,
        prefix=arguments.prefix,
        dataset_name=arguments.dataset,
        dataset_arguments=_pairs(arguments.dataset_argument),
        protocols=arguments.protocols,
        protocol_arguments=_pairs(arguments.protocol_argument),
        seed=arguments.seed,
    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            value = "" if row["value"] is None else f"{row['value']:.4f}"
            print(f"{row['protocol']}/{row['metric']:<12} {value:>8}  n={row['n_test']}  {row['note']}".rstrip())
    return 0


def _pairs(texts: list[str]) -> dict[str, Any]:
    import yaml

    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"An argument must read KEY=VALUE, got {text!r}.")
        pairs[key] = yaml.safe_load(value)
    return pairs


def _check(arguments: argparse.Namespace) -> int:
    from ssl_bench.checking.main import main as check

    return check(arguments)


def _speed(arguments: argparse.Namespace) -> int:
    import dataclasses

    from ssl_bench.speed.measure import measure

    figures = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=2))
        return 0
    title = ""
    for figure in figures:
        if figure.table != title:
            title = figure.table
            print(f"\n{title}")
        spread = f"({figure.low:,.3g} to {figure.high:,.3g})"
        print(f"  {figure.name:<30} {figure.median:>10,.4g} {figure.unit:<8} {spread:<24} {figure.ratio:6.2f}x")
    return 0


def _new_method(arguments: argparse.Namespace) -> int:
    from ssl_bench.scaffold import new_method

    for path in new_method(arguments.name):
        print(path)
    print(f"Next: ssl-bench check {arguments.name}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from ssl_bench.config.catalog import CATALOG

    catalog = CATALOG[arguments.kind.removesuffix("s")]
    entries = [catalog.entry(name) for name in catalog.names()]
    if arguments.json:
        items = [{"name": e.name, "version": e.version, "summary": e.summary, **e.metadata} for e in entries]
        print(json.dumps(items, indent=2))
        return 0
    if arguments.markdown:
        print("| name | family | paper | what it computes |\n| --- | --- | --- | --- |")
        for e in entries:
            link = (
                f"[{e.metadata.get('paper')}](https://arxiv.org/abs/{e.metadata['arxiv']})"
                if "arxiv" in e.metadata
                else ""
            )
            print(f"| `{e.name}` | {e.metadata.get('family', '')} | {link} | {e.summary.replace('|', chr(92) + '|')} |")
        return 0
    width = max(len(entry.name) for entry in entries)
    family = max(len(str(entry.metadata.get("family", ""))) for entry in entries)
    for entry in entries:
        facts = [entry.name.ljust(width), str(entry.metadata.get("family", "")).ljust(family)]
        print("  ".join(filter(str.strip, [*facts, entry.summary])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
