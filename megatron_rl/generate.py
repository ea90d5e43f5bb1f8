"""Generates text from a model folder.

    python -m megatron_rl.generate --model DIR --prompt "The capital of France is"
    python -m megatron_rl.generate --model DIR --prompts prompts.jsonl --n 4 --output out.jsonl
    torchrun --nproc_per_node 4 -m megatron_rl.generate --model DIR --tp 2 --pp 2 --chat

A Hugging Face folder, a Megatron checkpoint or a step of a run. With --output every response is one
JSON line: prompt, response, token_ids, logprobs, full_logprobs, finish_reason. Exit code 2: wrong
input; 1: some requests could not be served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.rollout.records import open_records
from megatron_rl.runtime import Environment, quiet_expected_warnings, run_guarded


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parse(arguments)
    quiet_expected_warnings()
    return run_guarded(lambda: _run(options), Environment.read())


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_rl.generate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", required=True, metavar="DIR|ID", help="model folder or hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", help="text as it stands; may be repeated")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL or Parquet, one per row")
    what.add_argument("--chat", action="store_true", help="a conversation, line by line")
    parser.add_argument("--prompt-key", default="prompt", help="key in --prompts (default prompt)")
    parser.add_argument("--n", type=int, default=1, help="responses per prompt (default 1)")
    parser.add_argument("--output", type=Path, metavar="F.jsonl", help="write responses here")
    parser.add_argument("--role", default="actor", help="role in a checkpoint (default actor)")
    parser.add_argument("--backend", default="megatron", help="megatron, huggingface or vllm")
    parser.add_argument("--tp", type=int, help="tensor parallel size (default: ranks / pp)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size (default 1)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--kv-cache-gb", type=float, help="memory of the KV cache per rank")
    parser.add_argument("--trust-remote-code", action="store_true")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--max-new-tokens", type=int, default=256)
    sampling.add_argument("--min-new-tokens", type=int, default=0)
    sampling.add_argument("--stop", action="append", default=[], help="text that ends a response")
    sampling.add_argument("--ignore-eos", action="store_true")
    sampling.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    env = Environment.read()
    try:
        sampling = _sampling(options)
        prompts = _prompts(options)
        engine = _engine(options, env)
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    leads = env.rank == 0
    if options.chat:
        return _chat(engine, sampling, leads)
    if len(prompts) == 1 and options.n == 1 and not options.output and _streams(engine):
        for piece in engine.stream(prompts[0], sampling):
            _say(piece, leads, end="")
        _say("", leads)
        return 0
    responses = engine.generate(prompts, sampling, n=options.n)
    texts = [engine.tokenizer.decode(r.token_ids) for r in responses]
    if leads:
        given = [p for p in prompts for _ in range(options.n)]
        _write(options.output, list(zip(given, responses, texts, strict=True)))
    return 1 if any(r.error for r in responses) else 0


def _sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        max_new_tokens=options.max_new_tokens, min_new_tokens=options.min_new_tokens,
        stop=tuple(options.stop), ignore_eos=options.ignore_eos, seed=options.seed,
    )  # fmt: skip


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of the command line or of the file, in order."""
    if options.n < 1:
        raise ConfigError(f"--n is {options.n}: it must be at least 1")
    if options.prompts is None:
        return options.prompt or []
    prompts, key = [], options.prompt_key
    for number, record in enumerate(open_records(options.prompts).scan(), start=1):
        if not isinstance(record.get(key), str):
            raise ConfigError(
                f"--prompts: {options.prompts}, row {number} has no text under {key!r}; name the "
                "key with --prompt-key"
            )
        prompts.append(record[key])
    if not prompts:
        raise ConfigError(f"--prompts: {options.prompts} has no rows; write one prompt per row")
    return prompts


def _engine(options: argparse.Namespace, env: Environment) -> Any:
    from megatron_rl.generation.engine import EngineSettings
    from megatron_rl.inference import create_inference_engine

    ranks = env.world_size if options.backend == "megatron" else (options.tp or 1) * options.pp
    tp = options.tp or max(ranks // options.pp, 1)
    if tp * options.pp != ranks:
        raise ConfigError(
            f"--tp {tp} × --pp {options.pp} is {tp * options.pp}, but there are {ranks} ranks; "
            f"start {tp * options.pp} or change the sizes"
        )
    budget = None if options.kv_cache_gb is None else int(options.kv_cache_gb * 1e9)
    return create_inference_engine(
        options.model, options.backend, tp, pipeline_parallel_size=options.pp, role=options.role,
        dtype=options.dtype, settings=EngineSettings(kv_cache_bytes=budget),
        revision=options.revision, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _streams(engine: Any) -> bool:
    return hasattr(engine, "stream")


def _chat(engine: Any, sampling: SamplingParams, leads: bool) -> int:
    """Reads lines until the end of input; the conversation so far is the prompt."""
    if not _streams(engine):
        raise ConfigError("--chat needs --backend megatron, which can stream")
    messages: list[dict[str, str]] = []
    while (line := _next_line(leads)) is not None:
        messages.append({"role": "user", "content": line})
        prompt, answer = engine.tokenizer.encode_chat(messages), []
        for piece in engine.stream(prompt, sampling, request=len(messages)):
            answer.append(piece)
            _say(piece, leads, end="")
        _say("", leads)
        messages.append({"role": "assistant", "content": "".join(answer)})
    return 0


def _next_line(leads: bool) -> str | None:
    """The next line of rank 0's input, on every rank; None at its end."""
    import torch.distributed as dist

    line = None
    if leads:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n") or None
    box = [line]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def _say(text: str, leads: bool, end: str = "\n") -> None:
    if leads:
        print(text, end=end, flush=True)


def _write(path: Path | None, rows: Iterable[tuple[str, Response, str]]) -> None:
    """To the terminal, or to a JSONL file that appears complete or not at all."""
    if path is None:
        for prompt, response, text in rows:
            print(f"{prompt}{text}" if response.error is None else f"error: {response.error}")
            print("-" * 20)
        return
    lines = [
        json.dumps({
            "prompt": prompt, "response": text, "token_ids": response.token_ids,
            "logprobs": response.logprobs, "full_logprobs": response.full_logprobs,
            "finish_reason": response.finish_reason, "error": response.error,
        })
        for prompt, response, text in rows
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    draft.write_text("".join(line + "\n" for line in lines))
    draft.replace(path)
    print(f"{len(lines)} responses written to {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
