import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ssl_bench.errors import StoreError
from ssl_bench.results import store


def temporary_files(folder):
    return [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_json_round_trip_is_exact_and_numpy_scalars_are_plain(tmp_path):
    content = {"b": [0.1 + 0.2, None, True], "ä": "\n", "a": np.float32(0.1), "n": np.int64(3)}
    store.write_json(tmp_path / "new" / "x.json", content)
    assert store.read_json(tmp_path / "new" / "x.json") == {
        "b": [0.1 + 0.2, None, True], "ä": "\n", "a": float(np.float32(0.1)), "n": 3,
    }  # fmt: skip
    assert not temporary_files(tmp_path / "new")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {1, 2}, object(), np.zeros(2)])
def test_json_refuses_what_it_cannot_hold_and_leaves_the_old_file(tmp_path, bad):
    store.write_json(tmp_path / "x.json", 1)
    with pytest.raises(StoreError, match="JSON types and finite numbers"):
        store.write_json(tmp_path / "x.json", {"value": bad})
    assert store.read_json(tmp_path / "x.json") == 1


def test_hash_depends_on_content_not_on_key_order():
    assert store.content_hash({"a": 1, "b": (2, 3)}) == store.content_hash({"b": [2, 3], "a": 1})
    assert store.content_hash({"a": 1}) != store.content_hash({"a": 1.5})
    assert len(store.content_hash(None)) == 16


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"\0" * 40])
def test_torn_json_is_a_clear_error(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(StoreError, match="torn"):
        store.read_json(tmp_path / "x.json")


def test_missing_json_is_a_clear_error(tmp_path):
    with pytest.raises(StoreError, match="must exist"):
        store.read_json(tmp_path / "x.json")


def test_csv_round_trip(tmp_path):
    rows = [{"a": 0.1 + 0.2, "b": 'x,"y"\r\nz'}, {"a": None, "b": ""}, {"a": np.float64(1e-300), "b": "ü"}]
    store.write_csv(tmp_path / "x.csv", ["a", "b"], rows)
    read = store.read_csv(tmp_path / "x.csv")
    assert [row["b"] for row in read] == ['x,"y"\r\nz', "", "ü"]
    assert [row["a"] for row in read] == ["0.30000000000000004", "", "1e-300"]


def test_torn_csv_is_a_clear_error(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3")
    with pytest.raises(StoreError, match="torn"):
        store.read_csv(tmp_path / "x.csv")


def test_full_disk_keeps_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    store.write_text(tmp_path / "x", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store.write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert not temporary_files(tmp_path)


def test_folder_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="must be writable"):
        store.write_text(tmp_path / "file" / "x", "new")


def test_replacing_keeps_the_old_file_when_its_block_fails(tmp_path):
    store.write_text(tmp_path / "x", "old")
    with pytest.raises(RuntimeError, match="broken"), store.replacing(tmp_path / "x") as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError("broken")
    assert (tmp_path / "x").read_text() == "old"
    assert not temporary_files(tmp_path)


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = tmp_path / f".x.{store._HOST}~{dead.pid}~00000000.tmp"
    kept = tmp_path / f".x.{store._HOST}~{os.getppid()}~00000000.tmp"
    foreign = tmp_path / ".x.another-host~1~00000000.tmp"
    old_foreign = tmp_path / ".x.another-host~2~00000000.tmp"
    other = tmp_path / f".xy.{store._HOST}~{dead.pid}~00000000.tmp"
    for path in (gone, kept, foreign, old_foreign, other):
        path.write_text("")
    os.utime(old_foreign, (time.time() - 2 * 24 * 3600,) * 2)
    store.write_text(tmp_path / "x", "new")
    assert set(temporary_files(tmp_path)) == {kept, foreign, other}


def test_killed_writers_never_leave_a_torn_file(tmp_path):
    code = (
        "import sys; from ssl_bench.results.store import write_json\n"
        "number = 0\n"
        "while True:\n"
        "    write_json(sys.argv[1], {'number': number, 'pad': [number] * 20000}); number += 1"
    )
    target = tmp_path / "x.json"
    for attempt in range(8):
        writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
        deadline = time.monotonic() + 60
        before = target.stat().st_mtime_ns if target.exists() else None
        while not target.exists() or target.stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.0037 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = store.read_json(target)
        assert content["pad"] == [content["number"]] * 20000
    store.write_json(target, 0)
    assert not temporary_files(tmp_path)
