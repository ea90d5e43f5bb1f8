"""Layer: gloo ranks. A window over the context is transformers' sliding window, in generation and
in training alike."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from tests.generation.test_greedy_equals_transformers import load

WINDOW, NEW = 12, 40
PROMPTS = [list(range(3, 14)), [7, 8, 9], list(range(40, 52))]


@pytest.fixture
def mistral(tiny_model, tmp_path):
    """(our folder, transformers' folder with the window in its configuration)."""
    plain = tiny_model("mistral")
    windowed = tmp_path / "windowed"
    shutil.copytree(plain, windowed)
    config = json.loads((windowed / "config.json").read_text())
    config["sliding_window"] = WINDOW
    (windowed / "config.json").write_text(json.dumps(config))
    return str(plain), str(windowed)


def generate(rank, world, folder, layout, settings):
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(load(folder, world, **layout, window=WINDOW), EngineSettings(**settings))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    return [r.token_ids for r in engine.generate(PROMPTS, sampling)], engine.counts


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_generation_equals_a_sliding_window(ranks, mistral, layout):
    import transformers

    folder, windowed = mistral
    model = transformers.AutoModelForCausalLM.from_pretrained(windowed, dtype=torch.float32)
    block = 2 * 4 * 4 * 2 * 16 * 4 // layout.get("tp", 1) // layout.get("pp", 1)
    tight = dict(block_size=4, kv_cache_bytes=20 * block, max_batch_tokens=16)
    for settings in ({}, tight):
        for ours, counts in ranks(2 if layout else 1, generate, folder, layout, settings):
            for prompt, tokens in zip(PROMPTS, ours, strict=True):
                ids = torch.tensor([prompt + tokens])
                with torch.no_grad():
                    logits = model(ids).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert (logits.max(-1).values - chosen < 1e-4).all()
            # Three whole sequences would need 39 blocks of 4; what is seen fits into 20.
            assert not settings or counts.cache_blocks == 20


def by_kernels(rank, world, folder, choice, settings):
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams

    os.environ["MEGATRON_RL_KERNELS"] = choice
    try:
        settings = EngineSettings(block_size=4, max_batch_tokens=8, **settings)
        engine = Engine(load(folder, world, window=WINDOW), settings)
        each = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (11, 14, 8)]
        responses = engine.generate([[7, 8, 9], [3, 4, 5, 6, 7, 8], [40, 41]], each)
        return [r.token_ids for r in responses], [r.logprobs for r in responses], engine.counts
    finally:
        del os.environ["MEGATRON_RL_KERNELS"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(cuda_graphs=False, kv_cache_bytes=7 * 2 * 4 * 4 * 2 * 16 * 4),
        dict(burst=2, steps_ahead=1),
    ],
    ids=["eager", "fixed"],
)
def test_the_kernels_give_what_torch_gives(ranks, tiny_model, settings):
    """Under Triton's interpreter: eagerly and with so few blocks that sequences are computed again
    in chunks, and in passes of fixed size over their own state."""
    folder = str(tiny_model("mistral"))
    want, want_logprobs, _ = ranks(1, by_kernels, folder, "torch", {})[0]
    got, logprobs, counts = ranks(1, by_kernels, folder, "triton", settings)[0]
    assert got == want
    assert counts.preemptions > 0 or "kv_cache_bytes" not in settings
    for ours, theirs in zip(logprobs, want_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def our_stream(rank, world, folder, lengths):
    from megatron_rl.models.attention import AttentionBatch

    model = load(folder, world, window=WINDOW)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (sum(lengths),), generator=generator)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = AttentionBatch(
        positions_T=torch.cat([torch.arange(n) for n in lengths]), lengths=list(lengths),
        cu_seqlens_B1=starts,
    )  # fmt: skip
    with torch.no_grad():
        logits = model.chunks[0](
            input_ids=tokens[None], position_ids=None, attention_mask=None, packed_seq_params=batch
        )
    return tokens, logits


@pytest.mark.ranks
@pytest.mark.parametrize("lengths", [(40, 37), (40, 3, 5)], ids=["grid", "each"])
def test_training_sees_the_same_window(ranks, mistral, lengths):
    import transformers

    folder, windowed = mistral
    model = transformers.AutoModelForCausalLM.from_pretrained(windowed, dtype=torch.float32)
    tokens, logits = ranks(1, our_stream, folder, lengths)[0]
    start = 0
    for length in lengths:
        with torch.no_grad():
            want = model(tokens[None, start : start + length]).logits[0]
        torch.testing.assert_close(logits[start : start + length], want, atol=1e-4, rtol=1e-4)
        start += length


def too_long(rank, world, folder):
    from megatron_rl.generation.engine import Engine
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(load(folder, world, window=WINDOW))
    with pytest.raises(ValueError, match="13 tokens, more than rollout.max_cache_len = 12"):
        engine.generate([[1] * 13], SamplingParams())


@pytest.mark.ranks
def test_a_prompt_longer_than_the_window(ranks, tiny_model):
    ranks(1, too_long, str(tiny_model("mistral")))
