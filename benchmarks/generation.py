"""Tokens per second of in-process generation, against the floor and against other engines.

    python benchmarks/generation.py --model DIR --batch 16 --threads 2 --peer static      # on a CPU
    python benchmarks/generation.py --shape 1b --batch 1 64 256 --peer static megatron    # on a GPU
    python benchmarks/generation.py --shape 1b --lognormal 512 --forked --peer batch
    torchrun --nproc_per_node 2 benchmarks/generation.py --shape 8b --tp 2 --batch 32

Every response has exactly `--new` tokens, sampled at temperature 1; a warm-up run of the same size
comes first, so that compilation is not in the figures (graphs are captured again in each run; their
seconds are printed and taken off). `steady_tokens_per_s` is that of the median step, all sequences
decoding: without the prompts' pass; the share is its share of the floor of a decode step,

    max(weight bytes / bandwidth, 2 · weights · B / rate) + B · KV bytes(mean context) / bandwidth

with the copy bandwidth and the matrix rate measured in the same run. Peers (see
benchmarks/generation_peers.py) answer the same requests in turns with ours, `ratio` is the median
of ours over theirs in each turn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from generation_peers import Generate, peer

from megatron_rl.convert.kinds import open_model
from megatron_rl.convert.load import load_weights
from megatron_rl.generation.engine import Engine, EngineSettings
from megatron_rl.generation.sequence import SamplingParams
from megatron_rl.inference import join_ranks
from megatron_rl.models.architecture import Architecture, Experts, Rope
from megatron_rl.models.gpt import DTYPES, ParallelModel, build_model
from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

SHAPES = {
    "1b": dict(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True),
    "8b": dict(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, tied=False),
    "30b-a3b": dict(
        family="qwen3_moe", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=768,
        tied=False, qk_norm=True, experts=Experts(count=128, per_token=8, normalised=True),
    ),
}  # fmt: skip
VOCAB, CONTEXT = 128256, 8192


def build(options: argparse.Namespace) -> ParallelModel:
    """The model of a folder, or one of a known shape with random weights."""
    join_ranks()
    layout = Layout(world_size=dist.get_world_size(), tp=options.tp)
    groups = ParallelGroups(layout=layout)
    seed_model_parallel(0, groups)
    if options.model:
        folder = open_model(options.model, "actor")
        model = build_model("actor", folder.architecture, groups, dtype=options.dtype)
        load_weights(model, folder)
        return model
    common = dict(family="llama", vocab=VOCAB, norm_eps=1e-5, max_positions=CONTEXT)
    arch = Architecture(rope=Rope(theta=500000.0), **(common | SHAPES[options.shape]))
    model = build_model("actor", arch, groups, dtype=options.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], None], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read + write) and matrix rate in operations/s."""
    size = 1 << (30 if device.type == "cuda" else 26)
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    side = 8192 if device.type == "cuda" else 1024
    x = torch.randn(side, side, device=device).to(dtype)
    b.copy_(a), x @ x
    return 2 * size / seconds_of(lambda: b.copy_(a)), 2 * side**3 / seconds_of(lambda: x @ x)


def floor_seconds(
    model: ParallelModel, batch: int, context: float, bandwidth: float, rate: float
) -> float:
    """Least time of one decode step on this rank; of the experts it reads those that somebody
    takes, if all are as likely."""
    embedding = 0 if model.arch.tied else model.arch.vocab * model.arch.hidden
    count = sum(p.numel() for _, p in model.named_parameters()) - embedding
    read = active = count
    if model.arch.experts is not None:
        in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        share = model.arch.experts.per_token / model.arch.experts.count
        read -= in_experts * (1 - share) ** batch
        active -= in_experts * (1 - share)
    item = model.config.params_dtype.itemsize
    layers = model.arch.layers
    kv = 2 * layers * max(model.arch.kv_heads // model.groups.layout.tp, 1) * model.arch.head_dim
    matrices = max(read * item / bandwidth, 2 * active * batch / rate)
    return matrices + batch * context * kv * item / bandwidth


class Ours:
    """Our engine as one that can be timed."""

    def __init__(self, model: ParallelModel, options: argparse.Namespace) -> None:
        self.engine = Engine(model, settings(options))
        self.marks: list[float] = []
        self.steady: list[float] = []
        self.engine.after_step = lambda: self.marks.append(time.perf_counter())

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Seconds that are not ours: of graph capture."""
        self.marks.clear()
        sampling = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
        self.engine.generate(prompts, sampling)
        gaps = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        if gaps:
            self.steady.append(self.engine.burst * len(lengths) / statistics.median(gaps))
        return self.engine.counts.capture_seconds


def settings(options: argparse.Namespace) -> EngineSettings:
    return EngineSettings(
        max_running=max(options.max_running, 1), burst=options.burst,
        cuda_graphs=not options.no_graphs,
    )  # fmt: skip


def compare(
    ours: Ours, peers: dict[str, Generate], options: argparse.Namespace, lengths: list[int]
) -> dict:
    """Tokens/s over requests of these response lengths: ours and the peers', in turns."""
    draw = random.Random(0)
    largest = min(1000, ours.engine.model.arch.vocab)
    prompts = [[draw.randrange(5, largest) for _ in range(options.prompt)] for _ in lengths]
    ours.steady.clear()
    rates: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for _ in range(options.repeats + 1):
        for name, generate in {"ours": ours, **peers}.items():
            synchronize()
            begin = time.perf_counter()
            not_counted = generate(prompts, lengths) or 0.0
            synchronize()
            rates[name].append(sum(lengths) / (time.perf_counter() - begin - not_counted))
    rates = {name: values[1:] for name, values in rates.items()}
    row = {
        "tokens_per_s": statistics.median(rates["ours"]),
        "spread": [min(rates["ours"]), max(rates["ours"])],
        "steady_tokens_per_s": statistics.median(ours.steady[1:] or [math.nan]),
        "capture_s": ours.engine.counts.capture_seconds, "steps": ours.engine.counts.steps,
    }  # fmt: skip
    for name in peers:
        ratios = [a / b for a, b in zip(rates["ours"], rates[name], strict=True)]
        row[name] = {
            "tokens_per_s": statistics.median(rates[name]),
            "spread": [min(rates[name]), max(rates[name])],
            "ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)],
        }  # fmt: skip
    return row


def profile(model: ParallelModel, options: argparse.Namespace, batch: int) -> list[list]:
    """Where one run's device time goes: [kernel, milliseconds, calls], the longest first."""
    engine = Engine(model, settings(options))
    prompts = [list(range(5, 5 + options.prompt))] * batch
    sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
    engine.generate(prompts, sampling)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        engine.generate(prompts, sampling)
        synchronize()
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [[e.key[:80], round(e.self_device_time_total / 1e3, 3), e.count] for e in events[:24]]


def forked(model: ParallelModel, options: argparse.Namespace) -> dict:
    """Eight samples of one 1024-token prompt: its prefill and its blocks are counted once."""
    engine = Engine(model, EngineSettings(burst=options.burst))
    prompt = list(range(5, 1029))
    engine.generate([prompt], SamplingParams(max_new_tokens=32, ignore_eos=True), n=8)
    counts = engine.counts
    return {"computed_tokens": counts.computed_tokens, "prefill_tokens": 1024, "samples": 8}


def lognormal_lengths(options: argparse.Namespace) -> list[int]:
    draw = random.Random(1)
    mu = math.log(256) - options.sigma**2 / 2
    return [
        min(max(int(draw.lognormvariate(mu, options.sigma)), 1), 1024)
        for _ in range(options.lognormal)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder; else --shape with random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--lognormal", type=int, help="requests with mean 256, at most 1024 tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lognormal")
    parser.add_argument("--forked", action="store_true", help="eight samples of one long prompt")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--burst", type=int)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", action="store_true", help="kernels by device time")
    parser.add_argument(
        "--peer", nargs="+", choices=["static", "batch", "megatron"],
        help="other engines in the same run: see benchmarks/generation_peers.py",
    )  # fmt: skip
    options = parser.parse_args()
    options.dtype = options.dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    bandwidth, rate = limits(model.device, model.config.params_dtype)
    show({"bandwidth": bandwidth, "rate": rate, "device": str(model.device)})
    ours = Ours(model, options)
    peers = {name: peer(name, model, options) for name in options.peer or []}
    for batch in options.batch:
        row = {"batch": batch, **compare(ours, peers, options, [options.new] * batch)}
        context = options.prompt + options.new / 2
        floor = batch / floor_seconds(model, batch, context, bandwidth, rate)
        show(row | {"floor": floor, "share": row["steady_tokens_per_s"] / floor})
        for kernel in profile(model, options, batch) if options.profile else []:
            show({"kernel": kernel})
    if options.lognormal:
        lengths = lognormal_lengths(options)
        mean = round(statistics.mean(lengths))
        spread = compare(ours, peers, options, lengths)
        fixed = compare(ours, {}, options, [mean] * options.lognormal)
        show({
            "lognormal": spread, "forced": fixed, "mean_length": mean,
            "ratio": spread["tokens_per_s"] / fixed["tokens_per_s"],
        })  # fmt: skip
    if options.forked:
        show({"forked": forked(model, options)})
    dist.destroy_process_group()


def show(row: dict) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
