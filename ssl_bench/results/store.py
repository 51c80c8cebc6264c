"""Files that are either whole or absent, and content hashes.

Every file of a study is written beside its place under a temporary name, flushed to the disk and
renamed, so that a reader sees the old content or the new one, never a part. A killed writer leaves
at most a hidden `.<name>.<host>~<pid>~<token>.tmp`, which no reader looks at and the next writer of
that name removes.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import io
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_bench.errors import StoreError

_FOREIGN_LEFTOVER_SECONDS = 24 * 3600  # a temporary file of another machine is dead after a day
_HOST = socket.gethostname().replace("~", "-")


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well, it durably takes the place of `path`.

    For writers that need a file name (safetensors, checkpoints). When the block raises, the
    temporary file is removed and `path` is as before.

    Raises:
        StoreError: If the operating system refuses (disk full, read-only folder); the block's own
            OSErrors too.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{_HOST}~{os.getpid()}~{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"A result file must be writable, got {error.strerror or error!r} at {path}. Free space or change "
            "permissions and run the same command again: finished files are untouched."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Atomically write `data`; raises StoreError when the file system refuses."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path | str, text: str) -> None:
    """Atomically write `text` as UTF-8, newlines as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, obj: Any) -> None:
    """Atomically write `obj` as readable, key-sorted JSON.

    Raises:
        StoreError: If `obj` holds what JSON cannot (NaN, infinity, a foreign type), or the file
            system refuses.
    """
    write_text(path, _dumps(obj, f"the object for {path}", indent=1) + "\n")


def write_csv(path: Path | str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Atomically write rows as CSV text; see `csv_text`."""
    write_text(path, csv_text(columns, rows))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV with a header, line feeds as line ends, None as blank and floats as their shortest exact repr."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return buffer.getvalue()


def read_json(path: Path | str) -> Any:
    """The content of a JSON file.

    Raises:
        StoreError: If the file is missing, unreadable, or not whole JSON.
    """
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"{path} must exist, but it does not. Run the stage that writes it again.") from error
    except OSError as error:
        raise StoreError(f"{path} must be readable, got {error.strerror or error!r}. Check its permissions.") from error
    except ValueError as error:
        raise StoreError(
            f"{path} must hold whole JSON, got a torn or foreign file ({error}). "
            "Delete it and run the study again: only that stage is repeated."
        ) from error


def read_csv(path: Path | str) -> list[dict[str, str]]:
    """The rows of a CSV file as text cells.

    Raises:
        StoreError: If the file is missing or a row has another number of cells than the header.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path} must be a readable CSV file, got {error}. Run the stage that writes it again."
        ) from error
    lines = list(csv.reader(io.StringIO(text, newline="")))
    for number, cells in enumerate(lines):
        if len(cells) != len(lines[0]):
            raise StoreError(
                f"Every row of {path} must have {len(lines[0])} cells, got {len(cells)} in row {number}. "
                "The file is torn: delete it and run the study again."
            )
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]]


def canonical_json(obj: Any) -> str:
    """The one JSON text of `obj`: keys sorted, no spaces, exact floats; equal objects, equal text.

    Raises:
        StoreError: If `obj` holds what JSON cannot (NaN, infinity, a foreign type).
    """
    return _dumps(obj, "an object to be hashed", separators=(",", ":"))


def content_hash(obj: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of `canonical_json(obj)`."""
    return hashlib.sha256(canonical_json(obj).encode("utf-8")).hexdigest()[:16]


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files that dead writers of `folder / name` left behind."""
    for leftover in folder.glob(f".{glob.escape(name)}.*~*~*.tmp"):
        host, pid, _ = leftover.name.removeprefix(f".{name}.").removesuffix(".tmp").split("~")
        with contextlib.suppress(OSError, ValueError):
            if host == _HOST:
                dead = not _alive(int(pid))
            else:
                # both times come from the file server, so that this machine's clock does not matter
                dead = folder.stat().st_mtime - leftover.stat().st_mtime > _FOREIGN_LEFTOVER_SECONDS
            if dead:
                leftover.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    # the rename itself must reach the disk; some network file systems refuse to open folders
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cell(value: Any) -> Any:
    if _is_array_scalar(value):
        value = value.item()
    return repr(value) if isinstance(value, float) else value


def _is_array_scalar(value: Any) -> bool:
    """NumPy scalars and 0-d tensors, recognized without importing their libraries."""
    return getattr(value, "ndim", None) == 0 and hasattr(value, "item")


def _plain(value: Any) -> Any:
    if _is_array_scalar(value):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _dumps(obj: Any, what: str, **options: Any) -> str:
    try:
        return json.dumps(obj, sort_keys=True, ensure_ascii=False, allow_nan=False, default=_plain, **options)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"{what[0].upper()}{what[1:]} must hold JSON types and finite numbers only, got: {error}. "
            "Store None where there is no number."
        ) from error
