"""Progress of a trial: written now and then, read tolerantly, never a reason to fail."""

from types import SimpleNamespace

import pytest

from ssl_bench.results.trial import PROGRESS, progress
from ssl_bench.sweep.progress import EVERY_SECONDS, Progress


def test_progress_is_written_now_and_then(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    callback = Progress(tmp_path)
    for step, seconds in ((1, 0.0), (2, EVERY_SECONDS / 2), (3, EVERY_SECONDS)):
        clock[0] += seconds
        callback.on_train_batch_end(SimpleNamespace(global_step=step, estimated_stepping_batches=40))
        assert progress(tmp_path) == ({1: 1, 2: 1, 3: 3}[step], 40)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    callback = Progress(tmp_path / "absent")
    callback.on_train_batch_end(SimpleNamespace(global_step=1, estimated_stepping_batches=2))
    assert progress(tmp_path / "absent") is None


@pytest.mark.parametrize("text", ["", "1", "one two"])
def test_a_torn_file_says_nothing(tmp_path, text):
    (tmp_path / PROGRESS).write_text(text)
    assert progress(tmp_path) is None
