"""One generic registry for methods, datasets, backbones, protocols and diagnostics.

A plug-in is a class or function under a decorator with literal arguments, in a file of the kind's
package. Names and metadata are read from the source without importing it, so that `ssl-bench list`
is instant; the file is imported when its plug-in is first asked for. Other distributions add
plug-ins through an entry point in the kind's group.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from ssl_bench.errors import RegistryError, did_you_mean

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is known of a plug-in without importing it."""

    name: str
    module: str
    summary: str
    metadata: Mapping[str, Any]
    aliases: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Raised whenever the plug-in's numbers change; stored in every row."""
        return int(self.metadata.get("version", 1))


class Registry(Generic[T]):
    """Plug-ins of one kind, found by scanning the files of `package` and an entry-point group.

    Args:
        kind: Singular word for messages, and the suffix of the decorator `register_<kind>`.
        package: Dotted package whose files hold the plug-ins; files that begin with `_` are skipped.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self.entry_point_group = f"{package}"
        self._objects: dict[str, T] = {}
        self._live: dict[str, Entry] = {}
        self._scanned: dict[str, Entry] | None = None

    def register(self, name: str, *, aliases: tuple[str, ...] = (), **metadata: Any) -> Callable[[T], T]:
        """Decorator that makes the object available under `name` (permanent) and its aliases.

        Raises:
            RegistryError: If another object already has the name.
        """

        def decorate(obj: T) -> T:
            module = getattr(obj, "__module__", "?")
            known = self._live.get(name)
            if known is not None and known.module != module:
                raise RegistryError(
                    f"The {self.kind} name {name!r} must be unique, but both {known.module} and {module} "
                    "register it. Rename one of them."
                )
            doc = (getattr(obj, "__doc__", None) or "").strip().split("\n")[0]
            entry = Entry(name, module, doc, dict(metadata), aliases)
            self._live[name] = entry
            self._objects[name] = obj
            obj.registry_entry = entry  # type: ignore[attr-defined]
            return obj

        return decorate

    def names(self) -> list[str]:
        """Sorted permanent names of every plug-in that can be found."""
        return sorted({**self._scan(), **self._live})

    def entry(self, name: str) -> Entry:
        """Metadata of one plug-in, read from its source if it is not imported yet.

        Raises:
            RegistryError: If no plug-in has that name or alias.
        """
        entries = {**self._scan(), **self._live}
        if name in entries:
            return entries[name]
        for entry in entries.values():
            if name in entry.aliases:
                return entry
        raise RegistryError(f"Unknown {self.kind} {name!r}.{did_you_mean(name, entries)}")

    def get(self, name: str) -> T:
        """The registered object; imports its file on first use."""
        entry = self.entry(name)
        if entry.name not in self._objects:
            importlib.import_module(entry.module)
        if entry.name not in self._objects:
            raise RegistryError(
                f"Importing {entry.module} must register the {self.kind} {entry.name!r}, but it did not. "
                "Reload the module, or check its decorator."
            )
        return self._objects[entry.name]

    def _scan(self) -> dict[str, Entry]:
        if self._scanned is not None:
            return self._scanned
        found: dict[str, Entry] = {}
        for folder in _folders(self.package):
            for path in sorted(Path(folder).glob("*.py")):
                if path.name.startswith("_"):
                    continue
                for entry in _entries_of_file(path, f"{self.package}.{path.stem}", f"register_{self.kind}"):
                    if entry.name in found:
                        raise RegistryError(
                            f"The {self.kind} name {entry.name!r} must be unique, but both "
                            f"{found[entry.name].module} and {entry.module} register it. Rename one of them."
                        )
                    found[entry.name] = entry
        for point in entry_points(group=self.entry_point_group):
            spec = importlib.util.find_spec(point.module)
            if spec is None or spec.origin is None:
                raise RegistryError(f"The entry point {point.name!r} must name a module, got {point.value!r}.")
            for entry in _entries_of_file(Path(spec.origin), point.module, f"register_{self.kind}"):
                found.setdefault(entry.name, entry)
        self._scanned = found
        return found


def _folders(package: str) -> list[str]:
    # found from the top package's folder, since looking a subpackage up would import its parents
    top, *rest = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        raise RegistryError(f"The package {package} must be importable, but {top} is not. Install it.")
    return [str(Path(folder, *rest)) for folder in spec.submodule_search_locations]


def _entries_of_file(path: Path, module: str, decorator_name: str) -> list[Entry]:
    source = path.read_text(encoding="utf-8")
    if decorator_name not in source:
        return []
    entries = []
    for node in ast.parse(source, filename=str(path)).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(decorator_name)):
                continue
            try:
                name = ast.literal_eval(decorator.args[0])
                keywords = {str(k.arg): ast.literal_eval(k.value) for k in decorator.keywords}
            except (ValueError, IndexError) as error:
                raise RegistryError(
                    f"The arguments of @{decorator_name} must be literals, got {ast.unparse(decorator)!r} "
                    f"at line {node.lineno} of {module}. Write the name and metadata out."
                ) from error
            aliases = tuple(keywords.pop("aliases", ()))
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            entries.append(Entry(name, module, summary, keywords, aliases))
    return entries
