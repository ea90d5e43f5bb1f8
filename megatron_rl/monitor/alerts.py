"""Alerts: the known diseases of RL training, seen in the metrics of the last steps.

Every rule is a pure function of a window of metrics. A rule whose metrics are not there (no critic,
no reference) says nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.operation import AlertSettings

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What the rules look at.

    Attributes:
        first: the run's first steps, to compare with.
        last: the newest steps, oldest first.
        steps: steps of the run so far.
    """

    first: Sequence[Row]
    last: Sequence[Row]
    steps: int

    def mean(self, tag: str) -> float | None:
        """Mean over the newest steps, or None where they don't have the metric."""
        return _mean(self.last, tag)

    def start(self, tag: str) -> float | None:
        """The same over the run's first steps."""
        return _mean(self.first, tag)


def _mean(rows: Sequence[Row], tag: str) -> float | None:
    values = [row[tag] for row in rows if tag in row]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Above:
    """The mean of a metric over the newest steps is above its limit, or not a number.

    Attributes:
        limit: name of the setting; null switches the rule off.
        message: with places for `value` and `limit`.
    """

    tag: str
    limit: str
    message: str

    def __call__(self, window: Window, limits: AlertSettings) -> str | None:
        value, limit = window.mean(self.tag), getattr(limits, self.limit)
        if value is None or limit is None or not _above(value, limit):
            return None
        return self.message.format(value=value, limit=limit)


kl_explosion = Above(
    tag="kl/ref", limit="kl",
    message="KL explosion: {value:.3g} nats per token from the reference (limit {limit:g}); raise "
    "algorithm.kl.coef or lower training.actor.lr",
)  # fmt: skip
large_update = Above(
    tag="policy/approx_kl3", limit="update_kl",
    message="too large updates: a step moves the policy by {value:.3g} nats per token (limit "
    "{limit:g}); lower training.actor.lr or training.epochs",
)  # fmt: skip
clip_fraction = Above(
    tag="policy/clipfrac", limit="clipfrac",
    message="clipping: the clip is active on {value:.0%} of the tokens (limit {limit:.0%}); "
    "lower training.actor.lr or training.epochs",
)  # fmt: skip
drift = Above(
    tag="drift/mean_abs", limit="drift",
    message="drift: log-probs of generation and training differ by {value:.3g} on average (limit "
    "{limit:g}); set algorithm.importance_sampling.enable=true, and compare the precision of both",
)  # fmt: skip


def entropy_collapse(window: Window, limits: AlertSettings) -> str | None:
    now, start = window.mean("policy/entropy"), window.start("policy/entropy")
    share = limits.entropy_share
    if now is None or start is None or share is None or not now < share * start:
        return None
    return (
        f"entropy collapse: {now:.3g} nats per token, {start:.3g} at the start (limit "
        f"{share:.0%} of it); raise algorithm.entropy_coef or algorithm.clip_high, or lower "
        "training.actor.lr"
    )


def length_runs_away(window: Window, limits: AlertSettings) -> str | None:
    now, start = window.mean("length/response_mean"), window.start("length/response_mean")
    growth = limits.length_growth
    if now is None or start is None or growth is None or not _above(now, growth * start):
        return None
    reward, reward_start = window.mean("reward/mean"), window.start("reward/mean")
    cut = window.mean("length/truncated") or 0.0
    return (
        f"lengths run away, a sign of reward hacking: {now:.0f} tokens per response, {start:.0f} "
        f"at the start (limit ×{growth:g}), {cut:.0%} truncated, while the reward went from "
        f"{reward_start:.3g} to {reward:.3g}; read samples.jsonl, and see whether the reward "
        "pays for length (algorithm.overlong takes some of it back)"
    )


def explained_variance(window: Window, limits: AlertSettings) -> str | None:
    value = window.mean("value/explained_variance")
    floor = limits.explained_variance
    learning = window.steps < 2 * limits.window  # a fresh critic may be wrong for a while
    if value is None or floor is None or learning or not value < floor:
        return None
    return (
        f"the critic is worse than a constant: explained variance {value:.2f} (limit {floor:g}); "
        "raise training.critic.lr or algorithm.critic_warmup_steps"
    )


def straggler(window: Window, limits: AlertSettings) -> str | None:
    share = limits.straggler_share
    rows = [r for r in window.last if "spread/straggler_rank" in r and "perf/step_seconds" in r]
    if share is None or not rows or len(rows) < len(window.last):
        return None
    ranks = {int(row["spread/straggler_rank"]) for row in rows}
    lost = [row["spread/straggler_seconds"] / row["perf/step_seconds"] for row in rows]
    if len(ranks) > 1 or not min(lost) > share:
        return None
    return (
        f"straggler: the others wait for rank {ranks.pop()} (or its replica) "
        f"{sum(lost) / len(lost):.0%} of every step (limit {share:.0%}); look at its host in "
        "run.json with python -m megatron_rl.preflight"
    )


def not_finite(window: Window, limits: AlertSettings) -> str | None:
    """NaN or infinity in the newest step, or skipped optimizer steps in all of the window."""
    bad = [tag for tag, value in window.last[-1].items() if not math.isfinite(value)]
    if bad:
        return f"not finite: {', '.join(sorted(bad)[:4])}"
    skipped = [row.get("policy/skipped_steps", 0.0) for row in window.last]
    if len(skipped) == limits.window and min(skipped) > 0:
        return (
            f"no progress: optimizer steps were skipped in each of the last {len(skipped)} steps "
            "because gradients were not finite; use training.dtype=bf16 or lower the learning rate"
        )
    return None


RULES: dict[str, Callable[[Window, AlertSettings], str | None]] = {
    "kl": kl_explosion, "update_kl": large_update, "entropy": entropy_collapse,
    "clipfrac": clip_fraction, "length": length_runs_away,
    "explained_variance": explained_variance, "drift": drift, "straggler": straggler,
    "not_finite": not_finite,
}  # fmt: skip


def _above(value: float, limit: float) -> bool:
    return value > limit or math.isnan(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A disease that began (`message`) or ended (`message` is None) with a step."""

    rule: str
    message: str | None


class Alerts:
    """Follows a run: each disease is reported when it begins and when it is over.

    The first `window` steps are what later ones are compared with. The rules look at whole windows,
    except that numbers which are not finite are reported at once.
    """

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        self.active: set[str] = set()
        self._steps = 0
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=settings.window)

    def add(self, row: Row) -> list[Alert]:
        """Takes the metrics of the next step; returns what began or ended with it."""
        if not self.settings.enable:
            return []
        self._steps += 1
        if len(self._first) < self.settings.window:
            self._first.append(dict(row))
        self._last.append(dict(row))
        window = Window(first=self._first, last=list(self._last), steps=self._steps)
        whole = len(window.last) == self.settings.window
        changes = []
        for name, rule in RULES.items():
            message = rule(window, self.settings) if whole or rule is not_finite else None
            if (message is not None) != (name in self.active):
                self.active ^= {name}
                changes.append(Alert(rule=name, message=message))
        return changes
