"""Layer: pure. The report is one file that says what the run was, whatever the run wrote."""

from __future__ import annotations

import html
import json
import re

import pytest

from megatron_rl.monitor.__main__ import main
from megatron_rl.monitor.report import write_report
from megatron_rl.monitor.report_charts import MOST_POINTS, all_charts, smoothed
from megatron_rl.monitor.run_folder import read_rows
from tests.monitor.report_case import NASTY, SECRET, write_run


def figures_of(page: str) -> dict:
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    return json.loads(text.group(1))


def test_report_has_the_curves_and_the_run(tmp_path):
    folder = write_run(tmp_path / "my_run")
    page = write_report(folder).read_text()
    figures = figures_of(page)
    assert list(figures)[:4] == ["reward", "kl", "entropy", "lengths"] and "time" in figures
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "kl/ref" in row]
    kl = next(trace for trace in figures["kl"]["data"] if trace["name"] == "KL")
    assert kl["x"] == [row["step"] for row in rows]
    assert kl["y"] == pytest.approx([row["kl/ref"] for row in rows], rel=1e-5)
    names = {trace["name"]: trace for trace in figures["time"]["data"]}
    assert set(names) == {"generation", "update actor"} and set(names["generation"]["y"]) == {1.2}
    assert figures["reward"]["layout"]["shapes"][0]["x0"] == 40
    memory = figures["memory"]["data"][0]
    assert dict(zip(memory["x"], memory["y"], strict=True)) == {
        "generation": 3.0, "update actor": 9.0
    }  # fmt: skip
    assert None in figures["gradients"]["data"][0]["y"], "NaN is a gap"
    assert "<title>my_run · megatron-rl</title>" in page


def test_texts_of_the_run_stay_texts(tmp_path):
    page = write_report(write_run(tmp_path / "run")).read_text()
    assert NASTY not in page and page.count(html.escape(NASTY)) >= 5
    assert "throw new Error('escaped')</script>" not in page
    assert SECRET not in page and "api_key: &#x27;[redacted]&#x27;" in page


def test_report_loads_nothing_from_elsewhere(tmp_path):
    page = write_report(write_run(tmp_path / "run")).read_text()
    without_plotly = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", without_plotly)
    assert "@import" not in without_plotly and "url(" not in without_plotly


def test_long_runs_are_thinned_and_smoothed():
    rows = [{"step": i, "kl/ref": 1.0, "policy/entropy": float(i % 2)} for i in range(1, 5002)]
    charts = {chart.name: chart for chart in all_charts(rows)}
    steps = charts["kl"].figure["data"][0]["x"]
    assert len(steps) <= MOST_POINTS + 1 and steps[0] == 1 and steps[-1] == 5001
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)
    wave = smoothed([float(i % 2) for i in range(200)])
    assert all(0.4 < value < 0.6 for value in wave[100:])


def test_command_says_where_and_refuses_other_folders(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["report", "--run", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main(["report", "--run", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
