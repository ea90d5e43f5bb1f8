"""Layer: gloo ranks. What an engine promises beyond a batch of prompts."""

from __future__ import annotations

import pytest
import torch

from tests.generation.test_greedy_equals_transformers import load

PROMPT = list(range(1, 38))


def engine(folder, world, *, layout=None, settings=None, window=None, tokenizer=False):
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.text import TextTokenizer

    model = load(folder, world, **(layout or {}), window=window)
    decode = TextTokenizer(folder).decode if tokenizer else None
    return Engine(model, EngineSettings(**(settings or {})), decode)


def params(**kwargs):
    from megatron_rl.generation.sequence import SamplingParams

    return SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, "seed": 5, **kwargs})


def samples(rank, world, folder, layout, settings):
    made = engine(folder, world, layout=layout, settings=settings)
    prompts = [PROMPT, PROMPT[:5]]
    responses = made.generate([p for p in prompts for _ in range(4)], params())
    if made.settings.share_prefixes:
        assert responses == made.generate(prompts, params(), n=4)
    return [(r.token_ids, r.logprobs) for r in responses], made.counts


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_samples_of_a_prompt_are_computed_once(ranks, tiny_model_dir, layout):
    """Same tokens as four requests each; the prompts' 42 tokens go through the model once."""
    world = 2 if layout else 1
    alone = ranks(world, samples, str(tiny_model_dir), layout, dict(share_prefixes=False))
    together = ranks(world, samples, str(tiny_model_dir), layout, {})
    for (expected, _), (got, counts) in zip(alone, together, strict=True):
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        torch.testing.assert_close(
            torch.tensor([lp for _, lp in got]), torch.tensor([lp for _, lp in expected])
        )
        assert counts.computed_tokens == 42 + 8 * 11
        assert len({tuple(tokens) for tokens, _ in got[:4]}) == 4, "samples differ"


@pytest.mark.ranks
def test_samples_survive_a_tight_cache(ranks, tiny_model_dir):
    wide = ranks(1, samples, str(tiny_model_dir), {}, dict(block_size=8))[0]
    block = 2 * 4 * 8 * 2 * 16 * 4
    for cap in (dict(kv_cache_bytes=9 * block), dict(max_running=2)):
        tight = ranks(1, samples, str(tiny_model_dir), {}, dict(block_size=8, **cap))[0]
        assert [tokens for tokens, _ in tight[0]] == [tokens for tokens, _ in wide[0]]
        assert "kv_cache_bytes" not in cap or tight[1].preemptions > 0


def stopped(rank, world, folder, stop):
    made = engine(folder, world, tokenizer=True)
    ids = list(b"abc")
    sampling = params(max_new_tokens=40, stop=stop, ignore_eos=not stop)
    response = made.generate([ids], sampling)[0]
    return response.token_ids, made.decode(response.token_ids), response.finish_reason


@pytest.mark.ranks
def test_a_stop_text_of_several_tokens(ranks, tiny_model_dir):
    """Ends with the token that completes it, which stays part of the response."""
    tokens, text, reason = ranks(1, stopped, str(tiny_model_dir), ())[0]
    assert reason == "length"
    first = next(i for i in range(9, 39) if text[i - 1 : i + 2].isascii())
    stop = (text[first - 1 : first + 2], "never there")
    cut, cut_text, reason = ranks(1, stopped, str(tiny_model_dir), stop)[0]
    assert reason == "stop" and cut_text.endswith(stop[0]) and cut == tokens[: len(cut)]
    assert cut_text.count(stop[0]) == 1 and len(stop[0]) == 3


def without_tokenizer(rank, world, folder):
    made = engine(folder, world)
    with pytest.raises(ValueError, match="stop texts .* need a tokenizer"):
        made.generate([PROMPT], params(stop=("x",)))


@pytest.mark.ranks
def test_stop_texts_need_a_tokenizer(ranks, tiny_model_dir):
    ranks(1, without_tokenizer, str(tiny_model_dir))


def streamed(rank, world, folder, layout):
    made = engine(folder, world, layout=layout, settings=dict(burst=4))
    whole = made.generate([PROMPT], params(), requests=[3])[0]
    return list(made.stream(PROMPT, params(), request=3)), whole.token_ids


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_a_stream_yields_the_tokens_of_generate(ranks, tiny_model_dir, layout):
    for stream, whole in ranks(2 if layout else 1, streamed, str(tiny_model_dir), layout):
        assert stream == whole


def errors(rank, world, folder):
    made = engine(folder, world, settings=dict(kv_cache_bytes=2 * 4 * 16 * 2 * 16 * 4 * 4))
    prompts = [PROMPT[:3], [], [1, 999], [1] * 600, PROMPT[:3] * 20]
    return made.generate(prompts, params(), on_error="return"), made.generate(
        [PROMPT[:3]], params()
    )


@pytest.mark.ranks
def test_bad_requests_do_not_stop_the_others(ranks, tiny_model_dir):
    mixed, alone = ranks(1, errors, str(tiny_model_dir))[0]
    assert mixed[0].token_ids == alone[0].token_ids and mixed[0].finish_reason == "length"
    messages = ("prompt is empty", "outside the vocabulary", "leaves no room", "kv_cache_gb")
    for response, message in zip(mixed[1:], messages, strict=True):
        assert response.finish_reason == "error" and message in response.error
        assert response.token_ids == []


def aborted(rank, world, folder, layout, ahead):
    made = engine(folder, world, layout=layout, settings=dict(steps_ahead=ahead))
    whole = made.generate([PROMPT[:9], PROMPT, PROMPT[:4]], params())
    done = {}
    with made.open() as session:
        for number, prompt in enumerate([PROMPT[:9], PROMPT, PROMPT[:4]]):
            made.request(session, number, prompt, params())
        while not session.finished:
            advanced, responses = session.step()
            done |= {r.request: r for r in responses}
            if any(s.request == 1 and s.generated == 5 for s in advanced):
                session.abort(1)
        free = session.blocks.free == session.blocks.count
    return whole, done, free


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "ahead"), [({}, 0), ({}, 2), ({"pp": 2}, 0)], ids=str)
def test_an_abort_leaves_the_others_alone(ranks, tiny_model_dir, layout, ahead):
    world = 2 if layout else 1
    for whole, done, free in ranks(world, aborted, str(tiny_model_dir), layout, ahead):
        assert free and done[1].finish_reason == "abort"
        assert done[1].token_ids == whole[1].token_ids[: len(done[1].token_ids)]
        assert 5 <= len(done[1].token_ids) <= 7
        for number in (0, 2):
            assert done[number].token_ids == whole[number].token_ids


def bursts(rank, world, folder, sampling, settings):
    made = engine(folder, world, layout={"tp": world}, settings=dict(block_size=4, **settings))
    prompts = [PROMPT, PROMPT[:5], PROMPT[:5], PROMPT[:20]]
    each = [params(max_new_tokens=n, **sampling) for n in (13, 30, 7, 21)]
    responses = made.generate(prompts, each)
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in responses], made.counts.steps


@pytest.mark.ranks
@pytest.mark.parametrize(
    "sampling", [{}, dict(top_p=0.8, ignore_eos=False, stop_token_ids=tuple(range(60)))]
)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_burst_of_decode_passes_changes_nothing(ranks, tiny_model_dir, sampling, ahead):
    """Nor do steps that are launched before the tokens of the one before are known."""
    single, steps = ranks(2, bursts, str(tiny_model_dir), sampling, {})[0]
    settings = dict(burst=8 if ahead < 2 else 3, steps_ahead=ahead)
    for many, fewer in ranks(2, bursts, str(tiny_model_dir), sampling, settings):
        assert fewer < steps
        for (tokens, logprobs, reason), expected in zip(many, single, strict=True):
            assert (tokens, reason) == (expected[0], expected[2])
            assert logprobs == pytest.approx(expected[1], abs=1e-4)


def by_kernels(rank, world, folder, choice, settings):
    import os

    os.environ["MEGATRON_RL_KERNELS"] = choice
    try:
        made = engine(folder, world, layout={"tp": world}, settings=dict(block_size=4, **settings))
        # Three sequences in a pass made for four, then two, then one; blocks are added meanwhile.
        prompts = [PROMPT[:19], PROMPT[:5], PROMPT[:4]]
        each = [params(max_new_tokens=n) for n in (3, 13, 8)]
        return [(r.token_ids, r.logprobs) for r in made.generate(prompts, each)]
    finally:
        del os.environ["MEGATRON_RL_KERNELS"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name, world", [("llama", 1), ("qwen3", 2)])
def test_the_kernels_give_what_torch_gives(ranks, tiny_model, name, world):
    """Under Triton's interpreter: every kernel of generation, eagerly and in passes of fixed size
    over their own state, as CUDA graphs have it."""
    folder = str(tiny_model(name))
    plain = ranks(world, by_kernels, folder, "torch", {})[0]
    for settings in (dict(cuda_graphs=False), dict(burst=2, steps_ahead=1)):
        for results in ranks(world, by_kernels, folder, "triton", settings):
            for (got, got_lp), (want, want_lp) in zip(results, plain, strict=True):
                assert got == want
                torch.testing.assert_close(
                    torch.tensor(got_lp), torch.tensor(want_lp), atol=1e-4, rtol=1e-4
                )
