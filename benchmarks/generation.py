"""Tokens per second of in-process generation, against the floor and against transformers.

    python benchmarks/generation.py --model DIR --batch 16 --threads 2 --peer        # on a CPU
    python benchmarks/generation.py --shape 1b --batch 1 64 256 --peer               # on a GPU
    python benchmarks/generation.py --shape 1b --lognormal 512 --forked
    torchrun --nproc_per_node 2 benchmarks/generation.py --shape 8b --tp 2 --batch 32

Every response has exactly `--new` tokens, sampled at temperature 1; a warm-up run of the same size
comes first, so that compilation is not in the figures (graphs are captured again in each run; their
seconds are printed and taken off). `steady_tokens_per_s` is that of the median step, all sequences
decoding: without the prompts' pass; the share is its share of the floor of a decode step,

    max(weight bytes / bandwidth, 2 · weights · B / rate) + B · KV bytes(mean context) / bandwidth

with the copy bandwidth and the matrix rate measured in the same run.
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

from megatron_rl.convert.kinds import open_model
from megatron_rl.convert.load import load_weights
from megatron_rl.generation.engine import Engine, EngineSettings
from megatron_rl.generation.sequence import SamplingParams
from megatron_rl.inference import join_ranks
from megatron_rl.models.architecture import Architecture, Rope
from megatron_rl.models.gpt import DTYPES, ParallelModel, build_model
from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

SHAPES = {
    "1b": dict(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True),
    "8b": dict(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, tied=False),
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
    arch = Architecture(
        family="llama", vocab=VOCAB, norm_eps=1e-5, max_positions=CONTEXT,
        rope=Rope(theta=500000.0), **SHAPES[options.shape],
    )  # fmt: skip
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
    """Least time of one decode step on this rank."""
    embedding = 0 if model.arch.tied else model.arch.vocab * model.arch.hidden
    count = sum(p.numel() for _, p in model.named_parameters()) - embedding
    item = model.config.params_dtype.itemsize
    layers = model.arch.layers
    kv = 2 * layers * max(model.arch.kv_heads // model.groups.layout.tp, 1) * model.arch.head_dim
    matrices = max(count * item / bandwidth, 2 * count * batch / rate)
    return matrices + batch * context * kv * item / bandwidth


def ours(model: ParallelModel, options: argparse.Namespace, lengths: list[int]) -> dict:
    """Median tokens/s of `--repeats` runs over requests of these response lengths."""
    settings = EngineSettings(
        max_running=max(options.max_running, 1), burst=options.burst,
        cuda_graphs=not options.no_graphs,
    )  # fmt: skip
    engine = Engine(model, settings)
    draw = random.Random(0)
    ids = range(5, min(1000, model.arch.vocab))
    prompts = [draw.choices(ids, k=options.prompt) for _ in lengths]
    sampling = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
    rates, steady, marks = [], [], []
    engine.after_step = lambda: marks.append(time.perf_counter())
    for _ in range(options.repeats + 1):
        synchronize()
        marks.clear()
        begin = time.perf_counter()
        engine.generate(prompts, sampling)
        synchronize()
        seconds = time.perf_counter() - begin - engine.counts.capture_seconds
        rates.append(sum(lengths) / seconds)
        gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        steady.append(engine.burst * len(lengths) / statistics.median(gaps))
    return {
        "tokens_per_s": statistics.median(rates[1:]), "spread": [min(rates[1:]), max(rates[1:])],
        "steady_tokens_per_s": statistics.median(steady[1:]),
        "capture_s": engine.counts.capture_seconds, "steps": engine.counts.steps,
    }  # fmt: skip


def profile(model: ParallelModel, options: argparse.Namespace, batch: int) -> list[list]:
    """Where one run's device time goes: [kernel, milliseconds, calls], the longest first."""
    settings = EngineSettings(
        max_running=max(options.max_running, 1), burst=options.burst,
        cuda_graphs=not options.no_graphs,
    )  # fmt: skip
    engine = Engine(model, settings)
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


def peer(options: argparse.Namespace, batch: int, model: ParallelModel) -> dict:
    """transformers' generate on the same device, dtype, prompt and lengths."""
    import transformers

    device = model.device
    if options.model:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=DTYPES[options.dtype], local_files_only=True
        )
    else:
        shape = SHAPES[options.shape]
        config = transformers.LlamaConfig(
            hidden_size=shape["hidden"], num_hidden_layers=shape["layers"], vocab_size=VOCAB,
            num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
            head_dim=shape["head_dim"], intermediate_size=shape["ffn"],
            tie_word_embeddings=shape["tied"], max_position_embeddings=CONTEXT,
        )  # fmt: skip
        with torch.device(device):
            theirs = transformers.LlamaForCausalLM(config).to(DTYPES[options.dtype])
    theirs = theirs.to(device).eval()
    ids = torch.randint(5, 1000, (batch, options.prompt), device=device)
    kwargs = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=options.new, do_sample=True, top_k=0,
        min_new_tokens=options.new, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    if device.type == "cuda":
        kwargs["cache_implementation"] = "static"
    with torch.no_grad():
        theirs.generate(ids, **kwargs)
        seconds = seconds_of(lambda: theirs.generate(ids, **kwargs), options.repeats)
    return {"tokens_per_s": batch * options.new / seconds}


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
    parser.add_argument("--peer", action="store_true", help="transformers in the same run")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    bandwidth, rate = limits(model.device, model.config.params_dtype)
    show({"bandwidth": bandwidth, "rate": rate, "device": str(model.device)})
    for batch in options.batch:
        row = {"batch": batch, **ours(model, options, [options.new] * batch)}
        context = options.prompt + options.new / 2
        floor = batch / floor_seconds(model, batch, context, bandwidth, rate)
        row |= {"floor": floor, "share": row["steady_tokens_per_s"] / floor}
        if options.peer:
            row["transformers"] = peer(options, batch, model)["tokens_per_s"]
            row["ratio"] = row["tokens_per_s"] / row["transformers"]
        show(row)
        for kernel in profile(model, options, batch) if options.profile else []:
            show({"kernel": kernel})
    if options.lognormal:
        draw = random.Random(1)
        mu = math.log(256) - options.sigma**2 / 2
        lengths = [
            min(max(int(draw.lognormvariate(mu, options.sigma)), 1), 1024)
            for _ in range(options.lognormal)
        ]
        mean = round(statistics.mean(lengths))
        spread = ours(model, options, lengths)
        fixed = ours(model, options, [mean] * options.lognormal)
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
