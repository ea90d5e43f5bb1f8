"""Layer: browser. Headless Chromium draws every chart of the report without an error."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from megatron_rl.monitor.report import write_report
from tests.monitor.report_case import write_run


@pytest.mark.browser
def test_charts_are_drawn_without_errors(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "needs chromium (apt-get install chromium)"
    report = write_report(write_run(tmp_path / "run"))
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2000",
         "--virtual-time-budget=20000", "--dump-dom", report.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"CONSOLE.*", done.stderr), done.stderr
    body = re.search(r'<body data-drawn="(\d+)"', done.stdout)
    assert body, "the page's script did not reach its end"
    for name in ("reward", "kl", "entropy", "lengths"):
        card = done.stdout.split(f'id="plot-{name}"')[1].split("</figure>")[0]
        path = re.search(r'class="js-line" d="(M[^"]{10,})"', card)
        assert path, f"no curve in the chart {name}"
    bars = done.stdout.split('id="plot-time"')[1].split("</figure>")[0]
    assert bars.count('class="point"') == 160, "two phases of 80 steps"
    assert "escaped" in done.stdout and done.stdout.count("<b>bold</b>") == 0
    assert int(body.group(1)) == done.stdout.count('class="card"')
