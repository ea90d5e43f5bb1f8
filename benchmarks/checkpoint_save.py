"""What saving costs a training step: without, waited for, and in the background.

    torchrun --nproc_per_node 2 benchmarks/checkpoint_save.py --hidden 512 --layers 8 --steps 30

The same supervised steps in every mode, a checkpoint every `--every` steps. Prints for each mode
the median step, the median of steps at whose start something was being written, how long `save`
itself held training up, and the largest resident memory of rank 0 above that of training alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megatron_rl import cuda_on_cpu

TOKENS, VOCABULARY = 64, 8192
MODES = ("none", "foreground", "background")


class PeakMemory:
    """Samples this process's resident memory in a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, process.memory_info().rss)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def build(options: argparse.Namespace):
    """A trainable Llama with random weights, optimizer state sharded over the ranks."""
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.architecture import Architecture, Rope
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=dist.get_world_size()))
    seed_model_parallel(0, groups)
    heads = options.hidden // 64
    architecture = Architecture(
        family="llama", hidden=options.hidden, layers=options.layers, heads=heads, kv_heads=heads,
        head_dim=64, ffn=options.hidden * 4, vocab=VOCABULARY, tied=True, norm_eps=1e-5,
        max_positions=TOKENS, rope=Rope(),
    )  # fmt: skip
    model = build_model("actor", architecture, groups, trainable=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return Trainable(model, OptimizerSettings(lr=1e-4), total_steps=1000)


def train_step(trainable) -> None:
    """One optimizer step on random tokens."""
    from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_backward

    model = trainable.model

    def loss(logits, part):
        logp = vocab_parallel_logprobs(
            logits, part.labels_N, group=model.groups.tp, vocab_start=model.vocab_start,
            vocab_size=model.arch.vocab, padded_vocab_size=model.padded_vocab,
        )  # fmt: skip
        value = -logp.mean()
        return value, {"loss": value.detach().clone()}

    sequences = [torch.randint(0, VOCABULARY, (TOKENS,)) for _ in range(4)]
    part = pack(sequences, [1] * 4, model=model, rows="response", samples=[0, 1, 2, 3], fields={})
    trainable.zero_grad()
    forward_backward(model, [part], loss, 1)
    trainable.step()


def measure(trainable, mode: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Runs the steps in one mode; times in seconds, memory in bytes."""
    from megatron_rl.checkpoint import CheckpointManager, RngState

    manager = CheckpointManager(
        folder / mode, groups=trainable.model.groups, keep_last=1, keep_every=None,
        async_save=mode == "background",
    )  # fmt: skip
    manager.add_trainable("actor", trainable)
    manager.add_rank_state("rng", RngState())
    quiet, writing, held = [], [], []
    with PeakMemory() as memory:
        for step in range(1, options.steps + 1):
            busy = manager.saving
            start = time.perf_counter()
            train_step(trainable)
            (writing if busy else quiet).append(time.perf_counter() - start)
            if mode != "none" and step % options.every == 0:
                start = time.perf_counter()
                manager.save(step)
                held.append(time.perf_counter() - start)
        manager.close()
    size = sum(f.stat().st_size for f in (folder / mode).rglob("*") if f.is_file())
    return {"quiet": _median(quiet), "writing": _median(writing), "held": _median(held),
            "peak": memory.peak, "bytes": size}  # fmt: skip


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 512), ("layers", 8), ("steps", 30), ("every", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    cuda_on_cpu.enable()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    shared = [tempfile.mkdtemp(dir=options.dir)]
    dist.broadcast_object_list(shared)
    trainable = build(options)
    for _ in range(3):
        train_step(trainable)
    base = 0
    for mode in MODES:
        found = measure(trainable, mode, Path(shared[0]), options)
        base = base or found["peak"]
        if dist.get_rank() == 0:
            print(json.dumps({
                "mode": mode, "step_s": round(found["quiet"], 4),
                "step_while_writing_s": round(found["writing"], 4),
                "save_holds_training_s": round(found["held"], 4),
                "memory_above_training_mb": round((found["peak"] - base) / 1e6, 1),
                "checkpoint_mb": round(found["bytes"] / 1e6, 1),
            }), flush=True)  # fmt: skip
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
