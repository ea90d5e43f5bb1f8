"""The charts of a report, as plain Plotly figures made from the rows of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.monitor.phases import PHASES

Row = dict[str, Any]

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
PHASE_COLOURS = {
    "generation": "#2563eb", "scoring": "#0891b2", "old_logprobs": "#a5b4fc",
    "ref_logprobs": "#c4b5fd", "values": "#93c5fd", "advantages": "#cbd5e1",
    "update_critic": "#f59e0b", "update_actor": "#ea580c", "checkpoint": "#16a34a",
    "evaluation": "#86efac", "startup": "#64748b", "param_gather": "#1e3a8a",
    "resharding": "#172554",
}  # fmt: skip
ALERT_COLOUR = "#dc2626"
MOST_POINTS = 1500
SMOOTH_FROM = 60  # steps from which a noisy curve also gets a smoothed one


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure with its title and the sentence under it."""

    name: str
    title: str
    about: str
    figure: dict[str, Any]


def all_charts(rows: Sequence[Row], alerts: Sequence[Row] = ()) -> list[Chart]:
    """Every chart that these rows have data for, what matters first at the top.

    Args:
        alerts: rows of alerts.jsonl; the chart of the reward marks where they began.
    """
    charts = [
        reward_chart(rows, alerts),
        _lines(rows, "kl", "KL from the reference", "nats per token, before it shapes any reward",
               {"kl/ref": "KL", "kl/loss": "KL loss"}),
        _lines(rows, "entropy", "Entropy", "of the policy, nats per token",
               {"policy/entropy": "entropy"}),
        _lines(rows, "lengths", "Response length", "tokens",
               {"length/response_mean": "mean", "length/response_max": "longest"}),
        _lines(rows, "clip", "Clipped tokens", "share of tokens where the clip is active",
               {"policy/clipfrac": "policy", "policy/dual_clipfrac": "dual clip",
                "value/clipfrac": "value", "length/truncated": "responses cut"}),
        time_chart(rows),
        _lines(rows, "update_kl", "Size of an update", "KL between old and new policy (k3)",
               {"policy/approx_kl3": "k3"}),
        _lines(rows, "gradients", "Gradient norm", "before clipping",
               {"policy/grad_norm": "policy", "value/grad_norm": "critic"}),
        _lines(rows, "critic", "Critic", "explained variance: 1 is perfect, below 0 is harmful",
               {"value/explained_variance": "explained variance"}),
        _lines(rows, "drift", "Generation against training",
               "difference of their log-probs on the same weights",
               {"drift/mean_abs": "mean |Δ|", "drift/outside_clip": "share outside the clip"}),
        _lines(rows, "throughput", "Throughput", "tokens per second",
               {"perf/tokens_per_second": "whole step",
                "throughput/generation_tokens_per_second": "generation",
                "throughput/update_actor_tokens_per_second": "actor update"}),
        _lines(rows, "mfu", "Model FLOPs utilisation", "share of the devices' dense peak",
               {"mfu/step": "whole step", "mfu/generation": "generation",
                "mfu/update_actor": "actor update"}),
        memory_chart(rows),
        _lines(rows, "ranks", "Waiting for the slowest rank", "seconds per step",
               {"spread/straggler_seconds": "seconds"}),
        _lines(rows, "busy", "Devices busy", "share of the time, extremes over ranks",
               {"hardware/busy_share": "mean", "hardware/busy_share_min": "least busy",
                "hardware/busy_share_max": "busiest"}),
    ]  # fmt: skip
    return [chart for chart in charts if chart.figure["data"]]


def reward_chart(rows: Sequence[Row], alerts: Sequence[Row] = ()) -> Chart:
    """Mean reward with a band of one standard deviation, evaluations, and where alerts began."""
    steps, means = _series(rows, "reward/mean")
    _, deviations = _series(rows, "reward/std")
    data: list[dict[str, Any]] = []
    if means and len(deviations) == len(means):
        upper = [m + d for m, d in zip(means, deviations, strict=True)]
        lower = [m - d for m, d in zip(means, deviations, strict=True)]
        band = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        data = [
            {**band, "x": steps, "y": upper, "showlegend": False},
            {**band, "x": steps, "y": lower, "fill": "tonexty", "name": "± 1 std",
             "fillcolor": "rgba(37,99,235,0.13)"},
        ]  # fmt: skip
    data += _curve(steps, means, "training", COLOURS[0])
    steps, values = _series(rows, "eval/reward_mean")
    if values:
        data.append(
            {"type": "scatter", "mode": "lines+markers", "x": steps, "y": values,
             "name": "held-out", "line": {"color": COLOURS[1], "dash": "dot"},
             "marker": {"size": 9, "symbol": "diamond"}}
        )  # fmt: skip
    chart = _chart("reward", "Reward", "mean over the samples of a step", data)
    began = [alert for alert in alerts if alert["message"] is not None]
    chart.figure["layout"]["shapes"] = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": a["step"], "x1": a["step"], "y0": 0,
         "y1": 1, "line": {"color": ALERT_COLOUR, "width": 1.5, "dash": "dash"}}
        for a in began
    ]  # fmt: skip
    chart.figure["layout"]["annotations"] = [
        {"x": a["step"], "y": 1, "yref": "paper", "text": a["rule"], "showarrow": False,
         "xanchor": "left", "yanchor": "top", "font": {"color": ALERT_COLOUR}}
        for a in began
    ]  # fmt: skip
    return chart


def time_chart(rows: Sequence[Row]) -> Chart:
    """Seconds of each phase of each step, stacked."""
    rows = [row for row in rows if "perf/step_seconds" in row]
    kept = _thinned(list(range(len(rows))))
    data = []
    for phase in PHASES:
        tag = f"perf/{phase}_seconds"
        if phase != "startup" and any(tag in rows[i] for i in kept):
            data.append(
                {"type": "bar", "name": phase.replace("_", " "),
                 "x": [rows[i]["step"] for i in kept], "y": [rows[i].get(tag, 0) for i in kept],
                 "marker": {"color": PHASE_COLOURS[phase], "line": {"width": 0}}}
            )  # fmt: skip
    figure = _chart("time", "Where the time goes", "seconds per phase, mean over ranks", data)
    figure.figure["layout"] |= {"barmode": "stack", "bargap": 0.08}
    figure.figure["layout"]["legend"] |= {"traceorder": "normal"}
    return figure


def memory_chart(rows: Sequence[Row]) -> Chart:
    """The peak of each phase over the run."""
    data = []
    for index, field in enumerate(("allocated", "reserved", "fragmented", "resident")):
        peaks = {}
        for phase in PHASES:
            values = [r[tag] for r in rows if (tag := f"memory/{phase}_{field}_gb") in r]
            if values:
                peaks[phase.replace("_", " ")] = max(values)
        if peaks:
            data.append(
                {"type": "bar", "name": field, "x": list(peaks), "y": list(peaks.values()),
                 "marker": {"color": COLOURS[index]}}
            )  # fmt: skip
    chart = _chart("memory", "Memory", "peak GB by phase, on the rank where it is largest", data)
    chart.figure["layout"] |= {"barmode": "group", "xaxis": {"title": None}}
    return chart


def _lines(rows: Sequence[Row], name: str, title: str, about: str, tags: dict[str, str]) -> Chart:
    data: list[dict[str, Any]] = []
    for (tag, label), colour in zip(tags.items(), COLOURS, strict=False):
        steps, values = _series(rows, tag)
        if any(values) or (values and not data):
            data += _curve(steps, values, label, colour)
    return _chart(name, title, about, data)


def _curve(steps: list[int], values: list[float], label: str, colour: str) -> list[dict[str, Any]]:
    if not values:
        return []
    line = {"type": "scatter", "x": steps, "y": values, "name": label, "legendgroup": label}
    if len(values) < SMOOTH_FROM:
        return [{**line, "mode": "lines+markers", "line": {"color": colour, "width": 2},
                 "marker": {"size": 5}}]  # fmt: skip
    faint = {**line, "mode": "lines", "opacity": 0.3, "line": {"color": colour, "width": 1}}
    bold = {**line, "mode": "lines", "y": smoothed(values), "line": {"color": colour, "width": 2.2}}
    return [{**faint, "showlegend": False, "hoverinfo": "skip"}, bold]


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the start's bias (divided by 1 - weight^n)."""
    total, out = 0.0, []
    for count, value in enumerate(values, 1):
        total = weight * total + (1 - weight) * value
        out.append(total / (1 - weight**count))
    return out


def _series(rows: Sequence[Row], tag: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[tag]) for row in rows if tag in row]
    kept = [points[i] for i in _thinned(list(range(len(points))))]
    return [step for step, _ in kept], [_rounded(value) for _, value in kept]


def _thinned(indices: list[int]) -> list[int]:
    """At most about `MOST_POINTS` of them, evenly, with the last."""
    stride = -(-len(indices) // MOST_POINTS) or 1
    return sorted({*indices[::stride], *indices[-1:]})


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _chart(name: str, title: str, about: str, data: list[dict[str, Any]]) -> Chart:
    layout = {
        "margin": {"l": 52, "r": 14, "t": 8, "b": 40}, "hovermode": "x unified",
        "xaxis": {"title": {"text": "step", "standoff": 6}}, "yaxis": {"rangemode": "normal"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "showlegend": sum(trace.get("showlegend", True) for trace in data) > 1,
    }  # fmt: skip
    return Chart(name=name, title=title, about=about, figure={"data": data, "layout": layout})
