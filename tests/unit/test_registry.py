"""The registry finds plug-ins by reading files, imports them on first use, and refuses clashes."""

import sys

import pytest

from ssl_bench.errors import RegistryError
from ssl_bench.registry import Registry

PLUGIN = '''
from fruits._kind import register_fruit

@register_fruit("apple", aliases=("pomme",), version=3, family="pome")
class Apple:
    """A round fruit."""

@register_fruit("pear")
def pear():
    """Another fruit."""
'''


@pytest.fixture
def fruits(tmp_path, monkeypatch):
    package = tmp_path / "fruits"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_kind.py").write_text(
        "from ssl_bench.registry import Registry\n"
        "FRUITS = Registry('fruit', 'fruits')\nregister_fruit = FRUITS.register\n"
    )
    (package / "basket.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "fruits"]:
        del sys.modules[name]


def registry():
    from fruits._kind import FRUITS

    return FRUITS


def test_names_and_metadata_need_no_import(fruits):
    assert registry().names() == ["apple", "pear"]
    entry = registry().entry("apple")
    assert (entry.version, entry.summary, entry.metadata["family"]) == (3, "A round fruit.", "pome")
    assert "fruits.basket" not in sys.modules


def test_get_imports_and_aliases_reach_the_permanent_name(fruits):
    assert registry().get("pomme").__name__ == "Apple"
    assert registry().get("pomme").registry_entry.name == "apple"


def test_unknown_name_suggests_the_nearest(fruits):
    with pytest.raises(RegistryError, match=r"Unknown fruit 'aple'\. Did you mean 'apple'\? Available: apple, pear\."):
        registry().get("aple")


def test_two_files_with_one_name_are_refused(fruits):
    (fruits / "second.py").write_text(PLUGIN)
    with pytest.raises(RegistryError, match="must be unique"):
        registry().names()


def test_a_name_that_is_no_literal_is_refused(fruits):
    (fruits / "second.py").write_text(
        "from fruits._kind import register_fruit\n@register_fruit('a' + 'b')\nclass A: ...\n"
    )
    with pytest.raises(RegistryError, match="must be literals"):
        registry().names()


def test_two_live_objects_with_one_name_are_refused():
    kind = Registry("thing", "ssl_bench.losses")

    class A: ...

    class B: ...

    kind.register("x")(A)
    B.__module__ = "elsewhere"
    with pytest.raises(RegistryError, match="must be unique"):
        kind.register("x")(B)
