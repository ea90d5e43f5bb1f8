"""Fills a parallel model from a model folder of any kind."""

from __future__ import annotations

import logging
import time

import torch

from megatron_rl.convert.model_folder import EMBEDDING, OUTPUT_WEIGHT, ModelFolder
from megatron_rl.convert.progress import Progress
from megatron_rl.models.gpt import ParallelModel

log = logging.getLogger("megatron_rl")


def load_weights(model: ParallelModel, folder: ModelFolder, *, show: bool = False) -> None:
    """Fills this rank's parameters in place; only the parts that this rank holds are read.

    A fresh value head, and the bias of a head that has none, become zero.

    Args:
        folder: one whose `check` has passed.
        show: a progress bar.
    """
    start = time.perf_counter()
    layout, rank = model.groups.layout, model.groups.tp_rank
    stored = folder.tensors()
    parameters = dict(model.named_parameters())
    total = sum(p.nbytes for p in parameters.values())
    label = f"loading {model.role}"
    with torch.no_grad(), Progress(label, total, show=show) as progress:
        for name, parameter in parameters.items():
            tied = name == OUTPUT_WEIGHT and model.head == "lm" and model.arch.tied
            name = EMBEDDING if tied else name
            if name in stored:
                folder.read_into(
                    name, parameter.data, tp=layout.tp, rank=rank, ep=layout.ep
                )
            else:
                assert name.startswith("output_layer.") and model.head == "value", name
                parameter.zero_()
            progress.advance(parameter.nbytes)
    seconds = time.perf_counter() - start
    notes = [folder.note, "the value head starts at zero" if folder.fresh_head else ""]
    log.info(
        "%s: %.2f GB of %s (%s) in %.1f s, %.2f GB/s%s", model.role, total / 1e9, folder.path,
        folder.kind, seconds, total / 1e9 / seconds, "".join(f"; {note}" for note in notes if note),
    )  # fmt: skip
