"""Layer: pure. Each known disease raises its own alert, once, and a healthy run raises none."""

from __future__ import annotations

import dataclasses
import random

import pytest

from megatron_rl.config.operation import AlertSettings
from megatron_rl.monitor.alerts import RULES, Alerts

WINDOW = 5
SETTINGS = AlertSettings(window=WINDOW)
HEALTHY = {
    "reward/mean": 0.5, "kl/ref": 0.05, "policy/approx_kl3": 0.01, "policy/entropy": 2.0,
    "policy/clipfrac": 0.1, "policy/skipped_steps": 0.0, "length/response_mean": 100.0,
    "length/truncated": 0.05, "value/explained_variance": 0.6, "drift/mean_abs": 0.002,
    "perf/step_seconds": 10.0, "spread/straggler_seconds": 0.3,
}  # fmt: skip
# rule → (what the sick steps show, words of the message, the limit's setting)
SICK = {
    "kl": ({"kl/ref": 3.0}, ["limit 1)", "kl.coef"], "kl"),
    "update_kl": ({"policy/approx_kl3": 0.9}, ["limit 0.2)", "actor.lr"], "update_kl"),
    "entropy": ({"policy/entropy": 0.1}, ["(limit 20%", "entropy_coef"], "entropy_share"),
    "clipfrac": ({"policy/clipfrac": 0.6}, ["limit 30%)", "epochs"], "clipfrac"),
    "length": (
        {"length/response_mean": 900.0, "reward/mean": 0.9},
        ["limit ×2)", "samples.jsonl"], "length_growth",
    ),
    "explained_variance": (
        {"value/explained_variance": -2.0}, ["(limit 0)", "critic.lr"], "explained_variance",
    ),
    "drift": ({"drift/mean_abs": 0.4}, ["limit 0.05)", "importance_sampling"], "drift"),
    "straggler": (
        {"spread/straggler_seconds": 4.0, "spread/straggler_rank": 3.0},
        ["rank 3", "40%", "10%"], "straggler_share",
    ),
    "not_finite": ({"policy/skipped_steps": 2.0}, ["skipped in each of the last 5"], None),
}  # fmt: skip


def steps(rng: random.Random, count: int, **changes: float) -> list[dict[str, float]]:
    """Metrics of `count` steps around healthy values; changed ones are exact."""
    rows = []
    for _ in range(count):
        row = {tag: value * rng.uniform(0.9, 1.1) for tag, value in HEALTHY.items()}
        row["spread/straggler_rank"] = float(rng.randrange(8))
        rows.append(row | changes)
    return rows


def follow(alerts: Alerts, rows: list[dict[str, float]]) -> list[tuple[int, str, str | None]]:
    """(index, rule, message) of everything that began or ended."""
    return [
        (i, change.rule, change.message) for i, row in enumerate(rows) for change in alerts.add(row)
    ]


def test_every_rule_has_a_case():
    assert set(SICK) == set(RULES)


@pytest.mark.parametrize("rule", SICK)
def test_a_disease_is_reported_once_and_when_it_is_over(rule):
    sick, words, _ = SICK[rule]
    rng, alerts = random.Random(rule), Alerts(SETTINGS)
    assert follow(alerts, steps(rng, 40)) == []
    begun = follow(alerts, steps(rng, 3 * WINDOW, **sick))
    assert [name for _, name, _ in begun] == [rule], begun
    at, _, message = begun[0]
    assert at < WINDOW, "noticed within a window"
    assert all(word in message for word in words), message
    ended = follow(alerts, steps(rng, 2 * WINDOW))
    assert [(name, text) for _, name, text in ended] == [(rule, None)]


def test_messages_give_the_numbers():
    alerts = Alerts(AlertSettings(window=1))
    row = dict(HEALTHY, **{"spread/straggler_rank": 0.0})
    alerts.add(row)
    sick = {tag: value for case in SICK.values() for tag, value in case[0].items()}
    texts = {alert.rule: alert.message for alert in alerts.add(row | sick)}
    numbers = {
        "kl": "3 nats", "update_kl": "0.9 nats", "entropy": "0.1 nats per token, 2 at the start",
        "clipfrac": "60% of the tokens", "explained_variance": "-2.00", "drift": "0.4 on average",
        "length": "900 tokens per response, 100 at the start (limit ×2), 5% truncated, while the "
        "reward went from 0.5 to 0.9", "straggler": "rank 3 (or its replica) 40% of every step",
        "not_finite": "each of the last 1 steps",
    }  # fmt: skip
    assert {rule: numbers[rule] in text for rule, text in texts.items()} == dict.fromkeys(
        RULES, True
    )


@pytest.mark.parametrize("rule", [rule for rule, case in SICK.items() if case[2]])
def test_null_switches_one_alert_off(rule):
    sick, _, setting = SICK[rule]
    settings = dataclasses.replace(SETTINGS, **{setting: None})
    rng, alerts = random.Random(rule), Alerts(settings)
    assert follow(alerts, steps(rng, 20) + steps(rng, 20, **sick)) == []


# rule → (metric, the limit's setting, the metric that the limit is a share of, range of limits)
EDGES = {
    "kl": ("kl/ref", "kl", None, (0.2, 9)),
    "update_kl": ("policy/approx_kl3", "update_kl", None, (0.05, 9)),
    "entropy": ("policy/entropy", "entropy_share", "policy/entropy", (0.1, 0.8)),
    "clipfrac": ("policy/clipfrac", "clipfrac", None, (0.2, 0.9)),
    "length": ("length/response_mean", "length_growth", "length/response_mean", (1.3, 4)),
    "explained_variance": ("value/explained_variance", "explained_variance", None, (-0.5, 0.4)),
    "drift": ("drift/mean_abs", "drift", None, (0.01, 1)),
    "straggler": (
        "spread/straggler_seconds", "straggler_share", "perf/step_seconds", (0.05, 0.8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", EDGES)
def test_a_limit_is_met_from_both_sides(rule):
    tag, setting, whole, limits = EDGES[rule]
    rng = random.Random()
    limit, size = rng.uniform(*limits), rng.uniform(1.5, 20.0)
    exact = {} if whole is None else {whole: size}
    edge = limit if whole is None else limit * size
    worse = 1 if SICK[rule][0][tag] > HEALTHY[tag] else -1
    for side, expected in ((-worse, []), (worse, [rule])):
        alerts = Alerts(dataclasses.replace(SETTINGS, **{setting: limit}))
        assert follow(alerts, steps(rng, 3 * WINDOW, **exact)) == []
        value = edge + side * 1e-3 * abs(edge)
        changes = exact | {tag: value, "spread/straggler_rank": 3.0}
        found = follow(alerts, steps(rng, WINDOW, **changes))
        assert [name for _, name, _ in found] == expected, (limit, size)


def test_a_fresh_critic_may_be_wrong_for_two_windows():
    rng, alerts = random.Random(1), Alerts(SETTINGS)
    bad = {"value/explained_variance": -1.0}
    assert follow(alerts, steps(rng, 2 * WINDOW - 1, **bad)) == []
    assert [name for _, name, _ in follow(alerts, steps(rng, 1, **bad))] == ["explained_variance"]


def test_slow_ranks_that_take_turns_are_no_straggler():
    rng, alerts = random.Random(2), Alerts(SETTINGS)
    rows = steps(rng, 30, **{"spread/straggler_seconds": 4.0})
    for i, row in enumerate(rows):
        row["spread/straggler_rank"] = float(i % 3)
    assert follow(alerts, rows) == []


def test_a_rank_that_is_late_in_all_but_one_step_is_no_straggler():
    rng, alerts = random.Random(), Alerts(SETTINGS)
    sick = SICK["straggler"][0]
    rows = steps(rng, 4 * WINDOW, **sick)
    for row in rows[:: WINDOW - 1]:  # at least one in every window
        row["spread/straggler_seconds"] = 0.5
    assert follow(alerts, rows) == []


def test_numbers_that_are_not_finite_are_named_at_once():
    rng, alerts = random.Random(3), Alerts(SETTINGS)
    found = follow(alerts, steps(rng, 1, **{"policy/loss": float("nan")}))
    assert [(name, "policy/loss" in text) for _, name, text in found] == [("not_finite", True)]
    alerts = Alerts(SETTINGS)
    found = follow(alerts, steps(rng, WINDOW, **{"kl/ref": float("nan")}))
    assert {"not_finite", "kl"} == {name for _, name, _ in found}


def test_missing_metrics_say_nothing_and_off_is_off():
    rows = [{"reward/mean": 0.1}] * 30
    assert follow(Alerts(SETTINGS), rows) == []
    rng = random.Random(4)
    sick = {tag: value for case in SICK.values() for tag, value in case[0].items()}
    off = Alerts(AlertSettings(enable=False, window=WINDOW))
    assert follow(off, steps(rng, 20) + steps(rng, 20, **sick)) == []
