"""Layer: the command line and the other back ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, ranks: int = 1, text: str | None = None):
    start = [sys.executable, "-m", "megatron_rl.generate"]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
                 "--standalone", "-m", "megatron_rl.generate"]  # fmt: skip
    return subprocess.run(
        [*start, *arguments], cwd=ROOT, capture_output=True, text=True, input=text, timeout=240
    )


@pytest.mark.slow
def test_samples_to_a_file(tiny_model_dir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "abc"}\n{"question": ""}\n{"question": "xyz"}\n')
    done = command(
        "--model", str(tiny_model_dir), "--prompts", str(prompts), "--prompt-key", "question",
        "--n", "2", "--max-new-tokens", "5", "--output", str(tmp_path / "out.jsonl"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == ["abc", "abc", "", "", "xyz", "xyz"]
    assert all("prompt is empty" in r["error"] for r in rows[2:4])
    for row in rows[:2] + rows[4:]:
        assert len(row["logprobs"]) == len(row["token_ids"]) <= 5
    assert rows[0]["token_ids"] != rows[1]["token_ids"]


@pytest.mark.slow
def test_the_real_model_chats_on_two_ranks(smollm2_path):
    done = command(
        "--model", str(smollm2_path), "--chat", "--temperature", "0", "--max-new-tokens", "24",
        ranks=2, text="What is the capital of France? Answer in one sentence.\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."


BAD = {
    "is no model folder": ["--model", "tests", "--prompt", "x"],
    "backend is 'rays'": ["--model", "MODEL", "--prompt", "x", "--backend", "rays"],
    "needs the vllm package": ["--model", "MODEL", "--prompt", "x", "--backend", "vllm"],
    "--n is 0": ["--model", "MODEL", "--prompt", "x", "--n", "0"],
    "temperature is -1.0": ["--model", "MODEL", "--prompt", "x", "--temperature", "-1"],
    "--tp 2 × --pp 1 is 2, but": ["--model", "MODEL", "--prompt", "x", "--tp", "2"],
    "there is no file 'nowhere.jsonl'": ["--model", "MODEL", "--prompts", "nowhere.jsonl"],
    "row 1 is not JSON": ["--model", "MODEL", "--prompts", __file__],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_before_any_rank_joins(tiny_model_dir, message):
    from megatron_rl import generate
    from megatron_rl.config import ConfigError

    arguments = [str(tiny_model_dir) if a == "MODEL" else a for a in BAD[message]]
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate._run(generate._parse(arguments))
    assert not torch.distributed.is_initialized()


def test_bad_input_is_one_line():
    done = command("--model", "tests", "--prompt", "x")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: 'tests' is no model folder")


def both_back_ends(rank, world, folder):
    from megatron_rl import create_inference_engine
    from megatron_rl.generation.sequence import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=16)
    prompts = ["hello", "a longer prompt with other words", "x"]
    answers = []
    for backend in ("megatron", "huggingface"):
        engine = create_inference_engine(folder, backend)
        answers.append([(r.token_ids, r.finish_reason) for r in engine.generate(prompts, sampling)])
    return answers


@pytest.mark.ranks
def test_back_ends_agree(ranks, tiny_model_dir):
    ours, peer = ranks(1, both_back_ends, str(tiny_model_dir))[0]
    assert ours == peer


def concurrently(rank, world, folder):
    import asyncio

    from megatron_rl import create_inference_engine
    from megatron_rl.generation.engine import EngineSettings
    from megatron_rl.generation.sequence import SamplingParams

    # An open session takes its whole budget, by default most of the host's memory.
    settings = EngineSettings(kv_cache_bytes=10**7)
    engine = create_inference_engine(folder, tensor_parallel_size=world, settings=settings)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    alone = [r.token_ids for r in engine.generate(["hello", "xyz", "late"], greedy)]
    text = "".join(engine.stream("hello", greedy))

    async def late() -> list[int]:
        await asyncio.sleep(0)
        return (await engine.agenerate("late", greedy)).token_ids

    async def bad() -> str:
        try:
            await engine.agenerate([], greedy)
        except ValueError as error:
            return str(error)
        return "no error"

    async def pieces() -> str:
        return "".join([piece async for piece in engine.astream("hello", greedy)])

    async def abandoned() -> None:
        async for _ in engine.astream("never read to its end", greedy):
            break

    async def everything():
        first = engine.agenerate("hello", greedy), engine.agenerate("xyz", greedy)
        results = await asyncio.gather(*first, late(), bad(), pieces(), abandoned())
        await engine.asynchronous.close()
        return results

    if rank > 0:
        engine.asynchronous.follow()
        return None
    one, two, three, message, joined, _ = asyncio.run(everything())
    assert [one.token_ids, two.token_ids, three] == alone
    assert "prompt is empty" in message and joined == text
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_requests_that_come_and_go(ranks, tiny_model_dir, world):
    assert ranks(world, concurrently, str(tiny_model_dir))[0]
