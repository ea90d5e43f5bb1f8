"""TensorBoard: scalars, histograms, text, hyper-parameters and a layout of the charts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.histograms import RATIO_LOG2_EDGES

# Tab "Custom scalars": category → chart → tags, what matters first at the top.
LAYOUT = {
    "1 · Does it learn?": {
        "reward": ["reward/mean", "eval/reward_mean"],
        "KL from the reference": ["kl/ref"],
        "entropy": ["policy/entropy"],
        "response length": ["length/response_mean", "length/response_max"],
    },
    "2 · Is it healthy?": {
        "clipped tokens": ["policy/clipfrac", "policy/dual_clipfrac", "value/clipfrac"],
        "KL of an update": ["policy/approx_kl3"],
        "gradient norms": ["policy/grad_norm", "value/grad_norm"],
        "explained variance": ["value/explained_variance"],
        "generation against training": ["drift/mean_abs", "drift/outside_clip"],
        "truncated responses": ["length/truncated"],
    },
    "3 · Where does the time go?": {
        "step": ["perf/step_seconds"],
        "phases": [
            f"perf/{name}_seconds"
            for name in ("generation", "scoring", "old_logprobs", "ref_logprobs", "values",
                         "update_critic", "update_actor")
        ],
        "MFU": ["mfu/step", "mfu/generation", "mfu/update_actor", "mfu/update_critic"],
        "ranks that wait": ["spread/straggler_seconds"],
        "busy": ["hardware/busy_share", "hardware/busy_share_min", "hardware/busy_share_max"],
    },
    "4 · Memory": {
        "GPU": [f"memory/update_actor_{x}_gb" for x in ("allocated", "reserved", "fragmented")],
        "host": ["perf/host_memory_gb"],
    },
}  # fmt: skip


class TensorBoardWriter:
    """Writes one run's events. Every step is flushed: a killed run keeps all it has shown.

    Args:
        first_step: steps already done. Later points of a run that was killed after its last
            checkpoint are taken back, so that its curves go on without a gap or a doubled point.
    """

    def __init__(self, folder: Path, *, first_step: int, hparams: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        old = any(folder.glob("events.out.tfevents.*")) if folder.is_dir() else False
        self._writer = SummaryWriter(
            str(folder), purge_step=(first_step + 1 if first_step else 0) if old else None
        )
        self._writer.add_custom_scalars(
            {
                category: {chart: ["Multiline", tags] for chart, tags in charts.items()}
                for category, charts in LAYOUT.items()
            }
        )
        self._hparams(hparams)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        self._writer.add_histogram(tag, values, step)

    def ratio_histogram(self, step: int, tag: str, counts: Tensor) -> None:
        """The buckets of `algorithms.histograms.ratio_counts`."""
        edges = torch.exp2(RATIO_LOG2_EDGES.double())
        tops = torch.cat((edges, edges[-1:] * 2))
        middles = torch.cat((edges[:1] / 2, (edges[:-1] + edges[1:]) / 2, edges[-1:] * 2))
        seen = counts.nonzero().reshape(-1)
        if not len(seen):
            return
        first, last = int(seen[0]), int(seen[-1])
        self._writer.add_histogram_raw(
            tag, min=float(middles[first]), max=float(middles[last]), num=float(counts.sum()),
            sum=float((counts * middles).sum()), sum_squares=float((counts * middles**2).sum()),
            bucket_limits=tops[first : last + 1].tolist(),
            bucket_counts=counts[first : last + 1].tolist(), global_step=step,
        )  # fmt: skip

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._writer.add_text(tag, markdown, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _hparams(self, hparams: Mapping[str, Any]) -> None:
        """The settings, in this run's own folder (`add_hparams` would open a second run)."""
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in hparams.items()
        }
        watched = dict.fromkeys(("reward/mean", "eval/reward_mean", "kl/ref"), 0.0)
        for part in hparams_summary(plain, watched):
            self._writer.file_writer.add_summary(part)


def samples_text(rows: list[dict[str, Any]]) -> str:
    """Samples with their rewards as Markdown; indented code can hold any text."""
    parts = []
    for row in rows:
        lines = f"{row['prompt']}⏵{row['response']}".splitlines() or [""]
        body = "\n".join(f"    {line}" for line in lines)
        parts.append(f"**reward {row['reward']:.3f}**\n\n{body}")
    return "\n\n---\n\n".join(parts)
