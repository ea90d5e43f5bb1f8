"""report.html of a run folder: one self-contained page with the curves and what the run was."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.monitor.console import duration
from megatron_rl.monitor.redaction import redact
from megatron_rl.monitor.report_charts import Chart, Row, all_charts
from megatron_rl.monitor.run_folder import read_attempts, read_rows, write_whole

PAGE = Path(__file__).with_name("report_page.html")


class PlotlyMissingError(ValueError):
    """The page holds plotly's JavaScript, and plotly is not installed; says what to do."""


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder from the files that are there.

    Returns:
        The report.

    Raises:
        ValueError: if the folder has no metrics.
        PlotlyMissingError: without plotly; nothing is written.
    """
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ValueError(
            f"{folder} has no metrics.jsonl with rows: name the folder of a run (its run_dir)"
        )
    path = folder / "report.html"
    try:
        page = render(folder, rows)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise PlotlyMissingError(
            f"{path} is not written, because plotly is not installed; pip install plotly, then "
            f"python -m megatron_rl.monitor report --run {folder}"
        ) from error
    write_whole(path, page)
    return path


def render(folder: Path, rows: Sequence[Row]) -> str:
    """The page's text. Everything that comes from the run is escaped."""
    from plotly.offline import get_plotlyjs

    alerts = read_rows(folder / "alerts.jsonl")
    charts = all_charts(rows, alerts)
    attempts = read_attempts(folder)
    parts = {
        "NAME": html.escape(folder.resolve().name),
        "SUBTITLE": html.escape(subtitle(attempts)),
        "TILES": _tiles(rows),
        "ALERTS": _alerts(alerts),
        "CHARTS": "\n".join(_card(chart) for chart in charts),
        "SAMPLES": _samples(read_rows(folder / "samples.jsonl")),
        "RUN": _run(attempts),
        "CONFIG": html.escape(_settings(folder / "config.yaml")),
        "FIGURES": _json_in_html({chart.name: chart.figure for chart in charts}),
        "PLOTLY": get_plotlyjs(),
    }
    page = PAGE.read_text(encoding="utf-8")
    # One pass over the template: a text of the run that looks like a placeholder stays a text.
    pieces = page.split("%%")
    return "".join(
        parts[piece] if i % 2 else piece for i, piece in enumerate(pieces)
    )  # fmt: skip


def _settings(path: Path) -> str:
    """The run's settings as YAML, without secrets: a report is passed on."""
    if not path.is_file():
        return ""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return yaml.safe_dump(redact(values), sort_keys=False, allow_unicode=True)


def subtitle(attempts: Sequence[dict[str, Any]]) -> str:
    """When, where and on what, in one line."""
    if not attempts:
        return ""
    last = attempts[-1]
    places = last["ranks"].get("places") or [{"host": "?", "device": "?"}]
    hosts = len({place["host"] for place in places})
    layout = " ".join(f"{axis}{last['ranks'].get(axis, '?')}" for axis in ("tp", "pp", "dp"))
    parts = [
        f"started {attempts[0]['started'][:16].replace('T', ' ')}",
        f"{len(places)} × {places[0]['device']} on {hosts} host{'s' * (hosts > 1)}", layout,
    ]  # fmt: skip
    commit = last["git"].get("commit")
    if commit:
        parts.append(f"commit {commit[:10]}" + (" with changes" if last["git"]["changed"] else ""))
    if len(attempts) > 1:
        resumed = ", ".join(str(a["first_step"]) for a in attempts[1:])
        parts.append(f"resumed after step {resumed}")
    return " · ".join(parts)


def _tiles(rows: Sequence[Row]) -> str:
    steps = [row for row in rows if "perf/step_seconds" in row]
    evaluations = [row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row]
    tiles = [("steps", f"{max(row['step'] for row in rows)}", "")]
    if steps:
        edge = max(len(steps) // 10, 1)
        first, last = (
            sum(row["reward/mean"] for row in part) / edge for part in (steps[:edge], steps[-edge:])
        )
        tiles.append(("training reward", f"{last:.3g}", f"{first:.3g} at the start"))
    if len(evaluations) > 1:
        tiles.append(("held-out reward", f"{evaluations[-1]:.3g}", f"{evaluations[0]:.3g} before"))
    if steps:
        seconds = sum(row["perf/step_seconds"] for row in steps)
        tiles.append(("in training steps", duration(seconds), f"{seconds / len(steps):.1f} s each"))
        speed = steps[-1]["perf/tokens_per_second"]
        mfu = steps[-1].get("mfu/step")
        tiles.append(("tokens per second", f"{speed:,.0f}", f"MFU {mfu:.1%}" if mfu else ""))
    return "\n".join(
        f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(note)}</small></div>"
        for label, value, note in tiles
    )


def _alerts(alerts: Sequence[Row]) -> str:
    begun = [alert for alert in alerts if alert["message"] is not None]
    if not begun:
        return '<p class="good">No alerts.</p>'
    items = (
        f"<li><b>step {int(alert['step'])}</b> {html.escape(alert['message'])}</li>"
        for alert in begun
    )
    return f'<ul class="alerts">{"".join(items)}</ul>'


def _card(chart: Chart) -> str:
    return (
        f'<figure class="card" id="card-{chart.name}"><figcaption><b>{html.escape(chart.title)}'
        f"</b> <span>{html.escape(chart.about)}</span></figcaption>"
        f'<div class="plot" id="plot-{chart.name}"></div></figure>'
    )


def _samples(samples: Sequence[Row], most: int = 6) -> str:
    """Samples of the first and of the last step, side by side in time."""
    if not samples:
        return "<p>No samples were written (monitor.samples_per_step).</p>"
    steps = sorted({row["step"] for row in samples})
    shown = [r for step in dict.fromkeys((steps[0], steps[-1])) for r in
             [s for s in samples if s["step"] == step][:most]]  # fmt: skip
    lines = (
        f"<tr><td>{int(row['step'])}</td><td>{float(row['reward']):.3g}</td>"
        f"<td><pre>{html.escape(row['prompt'])}</pre></td>"
        f"<td><pre>{html.escape(row['response'])}</pre></td></tr>"
        for row in shown
    )
    return (
        "<table><thead><tr><th>step</th><th>reward</th><th>prompt</th><th>response</th></tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _run(attempts: Sequence[dict[str, Any]]) -> str:
    parts = []
    for number, attempt in enumerate(attempts, 1):
        versions = ", ".join(f"{name} {version}" for name, version in attempt["versions"].items())
        rows = {
            "started": attempt["started"], "command": " ".join(attempt["command"]),
            "directory": attempt["directory"], "versions": versions,
            "commit": attempt["git"].get("commit", "no git checkout"),
        }  # fmt: skip
        cells = "".join(
            f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        title = f"<h3>Attempt {number}</h3>" if len(attempts) > 1 else ""
        parts.append(f'{title}<table class="facts"><tbody>{cells}</tbody></table>')
    return "\n".join(parts)


def _json_in_html(value: Any) -> str:
    """JSON that can stand inside a script element: no text can close it; NaN becomes null."""
    text = json.dumps(_finite(value))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
