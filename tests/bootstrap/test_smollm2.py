"""The real small model (downloaded once): its tokenizer, and the text it is known to write."""

import hypothesis
import pytest
import torch
from hypothesis import strategies
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def model(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path).eval()


# The vocabulary has no token for the bytes of these characters (six control codes, and everything
# from U+40000 on, where Unicode has assigned next to nothing); they vanish, as in the original.
IN_VOCABULARY = strategies.characters(
    codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"
)


@hypothesis.given(text=strategies.text(IN_VOCABULARY))
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@hypothesis.given(
    number=strategies.integers(0, 10**9), prefix=strategies.sampled_from(["", " ", "a"])
)
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_every_digit_is_a_token(tokenizer, number, prefix):
    tokens = tokenizer.tokenize(f"{prefix}{number}")
    assert tokens[-len(str(number)) :] == list(str(number))


def test_special_tokens(tokenizer):
    ids = (tokenizer.unk_token_id, tokenizer.bos_token_id)
    assert ids == (0, 1)
    # Padding and end of sequence are one id: masks, not ids, say what is padding.
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert len(tokenizer) == 49152
    assert tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids
    assert tokenizer.decode([1, 2, *range(3, 17)], skip_special_tokens=True) == ""


def greedy(model, inputs, tokens):
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :]


def test_known_completion(tokenizer, model):
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(greedy(model, inputs, 2)) == " Paris."


def test_known_chat_answer(tokenizer, model):
    question = "What is the capital of France? Answer in one sentence."
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = greedy(model, inputs, 16)
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_folder_is_a_checkpoint_like_any_other(tokenizer, model, tmp_path):
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    text = "12 + 345 =\n\tnaïve  日本"
    assert saved(text).input_ids == tokenizer(text).input_ids
    assert saved.chat_template == tokenizer.chat_template
    assert saved.tokenize("47") == ["4", "7"]
