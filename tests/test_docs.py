"""What the documents say can be typed, and the README's table of methods is the registry's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ssl_bench.cli import parser
from ssl_bench.config import parse_study

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def commands():
    for name in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / name).read_text(), re.S):
            for line in block.splitlines():
                line = line.split("#")[0].strip()
                if line:
                    yield pytest.param(line, id=f"{name}: {line}")


@pytest.mark.parametrize("command", commands())
def test_documented_command_exists(command):
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
        files = [word.partition("=")[2] for word in words if word.startswith("EXPERIMENT=")]
    else:
        assert words[0] == ".venv/bin/ssl-bench"
        parser().parse_args(words[1:])
        files = [word for word in words if word.endswith(".yaml")]
    for file in files:
        assert (ROOT / file).exists(), f"{file} is named in a document but does not exist"


def test_the_readme_study_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    parse_study(yaml.safe_load(text), where="README.md")


def test_the_readme_lists_the_registered_methods():
    command = [sys.executable, "-m", "ssl_bench.cli", "list", "methods", "--markdown"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    (section,) = re.findall(r"<!-- methods: .*? -->\n(.*?)<!-- /methods -->", (ROOT / "README.md").read_text(), re.S)
    assert section.strip() == table, "run scripts/update_readme.py"
