"""A room imports only rooms above it; methods import methods only to extend them; some rooms never import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ssl_bench"
ORDER = [
    "errors", "registry", "random", "records", "distributed", "results", "config", "losses", "nn", "optim",
    "data", "views", "regularizers", "methods", "training", "evaluation", "sweep", "checking", "scaffold", "speed",
    "cli",
]  # fmt: skip
BLIND = {("evaluation", "methods"), ("evaluation", "training"), ("losses", "distributed")}


def imports_of(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} must import by absolute name"
            names = [node.module or ""]
            if node.module == "ssl_bench":
                names = [f"ssl_bench.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("ssl_bench.")}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_room_imports_only_rooms_above_it(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ORDER, f"room {room!r} is not in the plan; add it to ORDER with its place"
    for other in imports_of(path) - {room, "__version__"}:
        assert ORDER.index(other) < ORDER.index(room), f"{room} imports {other}, which stands below it"
        assert (room, other) not in BLIND, f"{room} must not know {other}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=lambda p: p.stem)
def test_methods_import_methods_only_to_extend_them(path):
    if path.stem in ("__init__", "base"):
        return
    tree = ast.parse(path.read_text())
    bases = {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ssl_bench.methods."):
            names = {alias.name for alias in node.names}
            assert node.module == "ssl_bench.methods.base" or names <= bases, f"{path.stem} borrows {names}"


@pytest.mark.parametrize("module", ["ssl_bench.results", "ssl_bench.cli", "ssl_bench.config"])
def test_module_imports_without_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
