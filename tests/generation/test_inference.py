"""Layer: gloo ranks, and the real small model. The public door to generation."""

from __future__ import annotations

import pytest
import torch


def ask(rank, world, folder, prompts, kwargs):
    from megatron_rl import create_inference_engine
    from megatron_rl.generation.sequence import SamplingParams

    engine = create_inference_engine(folder, tensor_parallel_size=world)
    responses = engine.generate(prompts, SamplingParams(**kwargs))
    return [(r.token_ids, engine.tokenizer.decode(r.token_ids), r.finish_reason, r.logprobs)
            for r in responses]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_smollm2_answers(ranks, smollm2_path, world):
    """Nine heads on two ranks: padded with zero heads. Ends by its own end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one "
                 "sentence."}]  # fmt: skip
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
    prompts = [tokenizer("The capital of France is")["input_ids"], chat["input_ids"]]
    for answers in ranks(world, ask, str(smollm2_path), prompts,
                         dict(temperature=0.0, max_new_tokens=24)):  # fmt: skip
        assert answers[0][1].startswith(" Paris.")
        assert answers[1][1] == "The capital of France is Paris."
        assert answers[1][2] == "stop"


@pytest.mark.ranks
@pytest.mark.slow
def test_smollm2_greedy_equals_transformers(ranks, smollm2_path):
    """64 tokens, no exception for ties."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    prompts = [tokenizer(t)["input_ids"] for t in ("The capital of France is", "Water boils at")]
    ours = ranks(2, ask, str(smollm2_path), prompts,
                 dict(temperature=0.0, max_new_tokens=64, ignore_eos=True))[0]  # fmt: skip
    for prompt, answer in zip(prompts, ours, strict=True):
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, min_new_tokens=64,
            eos_token_id=None, pad_token_id=2,
        )  # fmt: skip
        assert answer[0] == out[0, len(prompt) :].tolist()


@pytest.mark.ranks
def test_smollm2_logits_equal_transformers(ranks, smollm2_path):
    from tests.models.test_logits_equal_transformers import our_logits, reference_logits

    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, 49000, (n,), generator=generator) for n in (12, 5)]
    expected = reference_logits(smollm2_path, sequences)
    for world in (1, 2):
        results = ranks(world, our_logits, str(smollm2_path), world, 1, 1, False, "fp32", sequences)
        for got, want in zip(results[0], expected, strict=False):
            torch.testing.assert_close(got[: len(want)], want, atol=1e-4, rtol=1e-4)


@pytest.mark.ranks
def test_samples_do_not_depend_on_tensor_parallelism(ranks, tiny_model_dir):
    prompts = ["hello", "hello", "a longer prompt with other words", "x"]
    sampling = dict(temperature=1.0, top_k=20, top_p=0.9, max_new_tokens=24, seed=3)
    one = ranks(1, ask, str(tiny_model_dir), prompts, sampling)[0]
    two = ranks(2, ask, str(tiny_model_dir), prompts, sampling)
    assert [a[0] for a in one] == [a[0] for a in two[0]] == [a[0] for a in two[1]]
    assert one[0][0] != one[1][0], "equal prompts of one batch must draw different samples"
    other_seed = ranks(1, ask, str(tiny_model_dir), prompts, {**sampling, "seed": 4})[0]
    assert [a[0] for a in other_seed] != [a[0] for a in one]


@pytest.mark.ranks
def test_limits_and_stop_ids(ranks, tiny_model_dir):
    free = ranks(1, ask, str(tiny_model_dir), ["abc"], dict(max_new_tokens=20, ignore_eos=True))
    tokens = free[0][0][0]
    assert len(tokens) == 20 and free[0][0][2] == "length"
    stop = tokens[6]
    first = tokens.index(stop)
    cut = ranks(1, ask, str(tiny_model_dir), ["abc"],
                dict(max_new_tokens=20, stop_token_ids=(stop,)))[0][0]  # fmt: skip
    assert cut[0] == tokens[: first + 1] and cut[2] == "stop"
    held_back = dict(max_new_tokens=20, stop_token_ids=(stop,), min_new_tokens=15)
    held = ranks(1, ask, str(tiny_model_dir), ["abc"], held_back)[0][0]
    assert stop not in held[0][:14] and len(held[0]) >= 15
    short = ranks(1, ask, str(tiny_model_dir), ["abc"],
                  dict(max_new_tokens=20, max_length=8, ignore_eos=True))[0][0]  # fmt: skip
    assert len(short[0]) == 5 and short[2] == "length"


BAD_SAMPLING = {
    "temperature is -1": dict(temperature=-1.0),
    "top_p is 0": dict(top_p=0.0),
    "max_new_tokens is 0": dict(max_new_tokens=0),
}


@pytest.mark.parametrize("message", BAD_SAMPLING)
def test_bad_sampling(message):
    from megatron_rl.generation.sequence import SamplingParams

    with pytest.raises(ValueError, match=message):
        SamplingParams(**BAD_SAMPLING[message])


def ask_badly(rank, world, folder):
    from megatron_rl import create_inference_engine

    engine = create_inference_engine(folder)
    prompts = [[], [1, 999], [1] * 600, [5, 6]]
    for prompt in prompts[:3]:
        with pytest.raises(ValueError):
            engine.generate([prompt], on_error="raise")
    return [(r.finish_reason, r.error) for r in engine.generate(prompts)]


@pytest.mark.ranks
def test_bad_requests_are_answered_and_the_others_served(ranks, tiny_model_dir):
    answers = ranks(1, ask_badly, str(tiny_model_dir))[0]
    messages = ("the prompt is empty", "outside the vocabulary", "leaves no room")
    for (reason, error), message in zip(answers[:3], messages, strict=True):
        assert reason == "error" and message in error
    assert answers[3][0] in ("stop", "length") and answers[3][1] is None


def sample_many(rank, world, folder, count, sampling):
    from megatron_rl import create_inference_engine
    from megatron_rl.generation.sequence import SamplingParams

    engine = create_inference_engine(folder, tensor_parallel_size=world)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, **sampling)
    responses = engine.generate([[5, 6, 7]] * count, params)
    return [(r.token_ids[0], r.logprobs[0], r.full_logprobs[0]) for r in responses]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "sampling", [dict(temperature=4.0), dict(temperature=4.0, top_k=6), dict(top_p=0.9,
                                                                             temperature=5.0)]
)  # fmt: skip
def test_samples_follow_the_softmax(ranks, tiny_model_dir, world, sampling):
    """Chi-square over the tokens that are expected at least five times."""
    count = 1500
    drawn = ranks(world, sample_many, str(tiny_model_dir), count, sampling)[0]
    expected = _distribution(tiny_model_dir, sampling)
    observed = torch.bincount(torch.tensor([t for t, _, _ in drawn]), minlength=259).double()
    common = expected * count >= 5
    rest = torch.stack((observed[~common].sum(), (expected[~common] * count).sum()))
    terms = (observed[common] - expected[common] * count).square() / (expected[common] * count)
    statistic, freedom = terms.sum(), int(common.sum()) - 1
    if rest[1] >= 5:
        statistic, freedom = statistic + (rest[0] - rest[1]).square() / rest[1], freedom + 1
    else:
        assert rest[0] <= rest[1] + 5
    # Mean + 5 standard deviations of the chi-square distribution.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)
    for token, logprob, _ in drawn[:50]:
        assert logprob == pytest.approx(expected[token].log().item(), abs=1e-3)


def _distribution(folder, sampling) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1] / sampling["temperature"]
    if "top_k" in sampling:
        logits[logits < logits.topk(sampling["top_k"]).values[-1]] = -torch.inf
    probabilities = logits.softmax(-1)
    if "top_p" in sampling:
        values, order = probabilities.sort(descending=True)
        keep = int((values.cumsum(0) < sampling["top_p"]).sum()) + 1
        probabilities[order[keep:]] = 0
        probabilities /= probabilities.sum()
    return probabilities
