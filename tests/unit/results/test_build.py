import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from ssl_bench.errors import StoreError
from ssl_bench.results.build import build_tables

from .synthetic import METHODS, write_study, write_trial

FEW = {name: METHODS[name] for name in ("random_init", "simclr", "mae")}
FILES = ["leaderboard.md", "leaderboard.csv", "leaderboard.tex", "rows.csv", "comparisons.csv", "report.html"]


def digests(paths, study):
    return {str(path.relative_to(study)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_build_writes_every_file_and_nothing_else(tmp_path):
    write_study(tmp_path, seeds=2, methods=FEW)
    written = build_tables(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in written] == [
        *FILES,
        "plots/accuracy_cost_fashion_mnist_mini.png",
        "plots/training_curves_fashion_mnist_mini.png",
        "plots/protocols_fashion_mnist_mini.png",
    ]
    for path in written:
        assert path.stat().st_size > 300
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES, "plots", "trials", ".tables.lock"}


def test_build_is_the_same_bytes_in_another_process_place_and_zone(tmp_path):
    write_study(tmp_path / "here" / "study", seeds=2, methods=FEW)
    write_study(tmp_path / "there" / "study", seeds=2, methods=FEW)
    here, there = tmp_path / "here" / "study", tmp_path / "there" / "study"
    expected = digests(build_tables(here), here)
    code = "import sys; from ssl_bench.results.build import build_tables; build_tables(sys.argv[1])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Kolkata", "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, env=environment, timeout=120)
    assert digests([there / name for name in expected], there) == expected


def test_build_removes_plots_of_datasets_that_are_gone(tmp_path):
    write_study(tmp_path, seeds=2, methods=FEW)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "accuracy_cost_gone.png").write_bytes(b"")
    written = build_tables(tmp_path)
    assert sorted((tmp_path / "plots").iterdir()) == sorted(path for path in written if path.suffix == ".png")


def test_build_of_a_folder_without_trials_creates_nothing(tmp_path):
    with pytest.raises(StoreError, match="must hold trials"):
        build_tables(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_build_survives_a_study_of_failures_only(tmp_path):
    write_trial(tmp_path, "t0", status="failed", reason="<b>boom</b>")
    (tmp_path / "trials" / "t1").mkdir()
    (tmp_path / "trials" / "t1" / "trial.json").write_text("{")
    build_tables(tmp_path)
    assert "&lt;b&gt;boom" in (tmp_path / "report.html").read_text()


def test_report_is_self_contained_and_shows_every_trial(tmp_path):
    write_study(tmp_path, seeds=2, methods=FEW)
    build_tables(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*""", text)
    assert "@import" not in text
    links, anchors = set(re.findall(r'href="#([^"]+)"', text)), set(re.findall(r'id="([^"]+)"', text))
    assert links <= anchors
    for trial in (tmp_path / "trials").iterdir():
        assert f"trial-{trial.name}" in links
    assert "the loss became NaN at step 5" in text
    header = re.search(r"<thead>(.*?)</thead>", text, re.S)[1].count("<th ")
    body = re.search(r"<tbody>(.*?)</tbody>", text, re.S)[1]
    assert [row.count("<td ") for row in body.split("</tr>")[:-1]] == [header] * len(FEW)


@pytest.mark.slow
def test_report_sorts_and_filters_in_a_browser(tmp_path):
    import shutil

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    write_study(tmp_path, seeds=2)
    build_tables(tmp_path)
    script = """
    <script>
    window.onerror = message => { document.body.innerHTML = `<pre id=out>error ${message}</pre>`; };
    const out = {}, form = document.getElementById("filters"), heads = [...document.querySelectorAll("#board th")];
    const names = () => [...document.querySelectorAll("#board tbody tr")].filter(r => !r.hidden).map(r => r.cells[0].textContent.trim());
    const click = title => heads.find(h => h.textContent.trim() === title).firstElementChild.click();
    const set = (name, value) => { form.elements[name].value = value; form.dispatchEvent(new Event("input")); };
    click("Time"); out.slowest = names()[0];
    click("Time"); out.fastest = names().slice(0, 2).sort();
    click("Method"); out.method = names();
    set("family", "contrastive"); out.family = names(); set("family", "");
    form.elements.references.checked = false; set("text", "diverged"); out.text = names();
    set("protocol", "geometry"); out.columns = heads.filter(h => !h.hidden).map(h => h.textContent.trim());
    location.hash = document.querySelector("#board td a").hash;
    setTimeout(() => {
      out.open = document.querySelectorAll("details[open]").length;
      document.body.innerHTML = "<pre id=out></pre>"; document.getElementById("out").textContent = JSON.stringify(out);
    }, 200);
    </script>"""  # noqa: E501
    page = tmp_path / "page.html"
    page.write_text((tmp_path / "report.html").read_text() + script)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    out = json.loads(re.search(r'<pre id="out">(.*?)</pre>', dom, re.S)[1])
    assert out == {
        "slowest": "mae",
        "fastest": ["random_init", "raw_pixels"],
        "method": ["byol", "mae", "random_init", "raw_pixels", "simclr", "supervised", "vicreg"],
        "family": ["simclr"],
        "text": ["mae"],
        "columns": ["Method", "Family", "Places", "geometry effective rank", "Epochs", "Seeds", "Time", "Images/s",
                    "Memory", "Parameters", "Status", "Notes"],
        "open": 1,
    }  # fmt: skip


def test_results_import_neither_torch_nor_plotting():
    code = (
        "import sys, ssl_bench.results.build\n"
        "slow = {'torch', 'lightning', 'pandas', 'matplotlib', 'jinja2', 'scipy.stats'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
