"""A trial and its folder, as a runner sees them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ssl_bench.config import TrialConfig
from ssl_bench.errors import SSLBenchError
from ssl_bench.results.store import read_json, write_json
from ssl_bench.results.trial import LOCK, VOID
from ssl_bench.sweep import stages

BROKEN = ("failed", "diverged", "collapsed")


@dataclasses.dataclass
class Job:
    """One trial to run; `tries` counts its processes, `not_before` is a time of the monotonic clock."""

    config: TrialConfig
    folder: Path
    tries: int = 0
    started: float = 0.0
    not_before: float = 0.0

    @property
    def status(self) -> dict[str, Any]:
        """Content of status.json, empty if there is none that can be read."""
        return _read(self.folder / "status.json")

    @property
    def cost(self) -> float:
        """Rough cost in units of an epoch of two views; judging counts as one."""
        sizes = [spec["size"] for spec in (self.config.views or {}).get("specs", ())]
        views = sum(size**2 for size in sizes) / max(sizes) ** 2 if sizes else 0.0
        return 1 + float(self.config.budget["epochs"]) * views / 2

    def needs_work(self) -> bool:
        """Whether something is unfinished; a broken trial is finished unless its protocols have changed."""
        stored, status = _read(self.folder / "trial.json"), self.status.get("status")
        if status in BROKEN:
            return bool(status == "failed" and stored.get("protocols") != self.config.to_json()["protocols"])
        return (
            status != "done"
            or not stages.is_pretrained(self.folder)
            or bool(stages.pending_protocols(self.config, self.folder))
            or not self.config.same_as(stored)
        )

    def prepare(self, *, retry_broken: bool) -> None:
        """Write what a table can say of a trial before it runs, and forget a broken end that is to be retried.

        A trial that another runner works on is left alone.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / LOCK, timeout=0):
                status = self.status.get("status")
                if not _read(self.folder / "trial.json"):
                    write_json(self.folder / "trial.json", self.config.to_json())
                if self.config.skip:
                    self.write_status("skipped", self.config.skip)
                elif retry_broken and status in BROKEN:
                    if status in VOID:  # a checkpoint that leads there again is of no use
                        (self.folder / "pretrain.json").unlink(missing_ok=True)
                        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
                    self.write_status("pending", "to be retried")
        except Timeout:
            pass

    def rank_failure(self) -> dict[str, Any]:
        """What the first rank that failed left behind, empty if none did; it is forgotten with this look."""
        path = self.folder / stages.FAILURE
        failure = _read(path)
        path.unlink(missing_ok=True)
        return failure

    def write_status(self, status: str, reason: str) -> None:
        """Write status.json for a trial without a process."""
        write_json(self.folder / "status.json", {"status": status, "reason": reason, "step": None, "stage": ""})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path) if path.exists() else {}
    except SSLBenchError:  # torn by a full disk, say: as good as absent
        return {}
    return content if isinstance(content, dict) else {}
