"""Put the registry's table of methods into README.md."""

import re
import subprocess
import sys
from pathlib import Path

readme = Path(__file__).parent.parent / "README.md"
command = [sys.executable, "-m", "ssl_bench.cli", "list", "methods", "--markdown"]
table = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
text = readme.read_text(encoding="utf-8")
pattern = re.compile(r"(<!-- methods: .*? -->\n).*?(<!-- /methods -->)", re.S)
readme.write_text(pattern.sub(lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text), encoding="utf-8")
