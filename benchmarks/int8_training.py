"""Loss of a small model trained with fp32 and with int8 gradient reduction, drawn over each other.

    torchrun --nproc_per_node 2 benchmarks/int8_training.py --picture docs/int8_training.svg

Next-token training on bytes of Python's own standard library, from one initialisation and one
order of data; only ``training.gradient_compression`` differs between the runs. Prints the mean loss
of the last 50 steps of each run, relative to fp32, over ``--seeds`` initialisations and orders, and
draws the last seed's curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from curves import draw

from megatron_rl import cuda_on_cpu

SEQUENCE, SEQUENCES = 128, 8  # tokens of a sequence, sequences per replica and step
TAIL = 50
RUNS = {
    "fp32": None,
    "int8": {},
    "int8, error feedback": {"error_feedback": True},
    "int8, stochastic rounding": {"stochastic_rounding": True},
}


def corpus() -> torch.Tensor:
    """Bytes of the standard library's top-level modules, in a fixed order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def write_model(folder: Path, seed: int) -> None:
    """A Llama of 0.4 M parameters over bytes."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, vocab_size=256, max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)


def batch(data: torch.Tensor, seed: int, step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 10**8 + step * 1000 + rank)
    starts = torch.randint(0, len(data) - SEQUENCE, (SEQUENCES,), generator=generator)
    return [data[start : start + SEQUENCE] for start in starts.tolist()]


def build(folder: Path, compression: dict | None, steps: int, sharded: bool):
    """A trainable model; gradients in int8 when ``compression`` is not None."""
    from megatron_rl.comm.grad_sync import install
    from megatron_rl.config.training import GradientCompressionSettings, OptimizerSettings
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=dist.get_world_size()))
    seed_model_parallel(0, groups)
    model = build_model("actor", read_architecture(folder), groups, dtype="fp32", trainable=True)
    load_huggingface(model, folder)
    # The rate decays, or chance alone moves the last losses of two equal runs by a per cent.
    settings = OptimizerSettings(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=20, clip_grad=1.0
    )
    trainable = Trainable(
        model, settings, total_steps=steps, distributed_optimizer=sharded, overlap_grad_reduce=True
    )
    if compression is not None:
        choice = GradientCompressionSettings(enable=True, min_bucket_elements=0, **compression)
        for chunk in model.wrapped:
            install(chunk, choice)
    return trainable


def losses(trainable, data: torch.Tensor, steps: int, seed: int) -> list[float]:
    """Mean loss per token over all ranks, step by step."""
    from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_backward

    model, groups = trainable.model, trainable.model.groups
    tokens = SEQUENCES * (SEQUENCE - 1) * groups.layout.dp

    def loss(logits, part):
        logp = vocab_parallel_logprobs(
            logits, part.labels_N, group=groups.tp, vocab_start=model.vocab_start,
            vocab_size=model.arch.vocab, padded_vocab_size=model.padded_vocab,
        )  # fmt: skip
        value = -logp.sum() / tokens
        return value, {"loss": value.detach().clone()}

    history = []
    for step in range(steps):
        sequences = batch(data, seed, step, groups.dp_rank)
        part = pack(sequences, [1] * SEQUENCES, model=model, rows="response",
                    samples=list(range(SEQUENCES)), fields={})  # fmt: skip
        trainable.zero_grad()
        metrics = forward_backward(model, [part], loss, 1)
        trainable.step()
        total = metrics[0]["loss"]
        dist.all_reduce(total, group=groups.dp)
        history.append(float(total))
    return history


def against_fp32(name: str, curves: dict[str, list[float]]) -> float:
    """Relative difference of the last steps' mean loss."""
    tail, exact = (sum(curves[run][-TAIL:]) / TAIL for run in (name, "fp32"))
    return tail / exact - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--sharded", action="store_true", help="distributed optimizer")
    options = parser.parse_args()
    cuda_on_cpu.enable()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    data = corpus()
    differences: dict[str, list[float]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        for seed in range(options.seeds):
            curves: dict[str, list[float]] = {}
            folder = Path(shared[0]) / str(seed)
            if dist.get_rank() == 0:
                write_model(folder, seed)
            dist.barrier()
            for name, compression in RUNS.items():
                trainable = build(folder, compression, options.steps, options.sharded)
                curves[name] = losses(trainable, data, options.steps, seed)
                differences[name].append(against_fp32(name, curves))
                if dist.get_rank() == 0:
                    print(json.dumps({"seed": seed, "run": name, "tail_loss": curves[name][-1],
                                      "against_fp32": f"{differences[name][-1]:+.3%}"}), flush=True)
    if dist.get_rank() == 0:
        for name, values in differences.items():
            mean, error = statistics.mean(values), 0.0
            if len(values) > 1:
                error = statistics.stdev(values) / len(values) ** 0.5
            print(f"{name}: {mean:+.3%} ± {error:.3%} over {len(values)} seeds", flush=True)
    if dist.get_rank() == 0 and options.picture:
        draw(curves, options.picture, x="optimizer step", y="loss per token (nats)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
