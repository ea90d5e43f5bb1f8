"""GGUF → Hugging Face on a tiny random model: same weights, same logits, nothing dropped."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from launch.gguf_to_hf import LAYER_TENSORS, OUTER_TENSORS, convert_gguf

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2
SPECIAL = ["<unk>", "<bos>", "<eos>"]
GGUF_NAMES = {theirs: ours for ours, theirs in (LAYER_TENSORS | OUTER_TENSORS).items()}


def vocabulary():
    # Three control tokens, the byte alphabet of byte-level BPE, and a few merges. The last one is
    # never applied, because digits are split before merging.
    alphabet = sorted(byte_symbol(byte) for byte in range(256))
    merges = ["a b", "Ġ ab", "1 2"]
    return SPECIAL + alphabet + ["ab", "Ġab", "12"], merges


def byte_symbol(byte):
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def gguf_row_order(weight, heads):
    """Row i of the first half of a head becomes row 2i, of the second half row 2i + 1."""
    out = torch.empty_like(weight)
    half = HEAD_DIM // 2
    for head in range(heads):
        for i in range(half):
            out[head * HEAD_DIM + 2 * i] = weight[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = weight[head * HEAD_DIM + half + i]
    return out


def gguf_name(name):
    stem, _, suffix = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, kind = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[kind]}.{suffix}"


def random_model(tied):
    tokens, _ = vocabulary()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=3e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(file, model, *, architecture="llama", pre="smollm", extra_tensor=None):
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HEADS * HEAD_DIM)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(3e-4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}")
    for name, value in model.named_parameters():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        value = gguf_row_order(value.detach(), heads) if heads else value.detach()
        writer.add_tensor(gguf_name(name), value.numpy())
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(tmp_path, model, **options):
    write_gguf(tmp_path / "model.gguf", model, **options)
    folder = tmp_path / "hf"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_logits_survive(tmp_path, tied):
    source = random_model(tied)
    folder = converted(tmp_path, source)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings is tied
    for (name, ours), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = torch.randint(0, model.config.vocab_size, (3, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-5, rtol=1e-5)


def test_tokenizer_merges_splits_digits_and_knows_its_specials(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, random_model(tied=True)))
    assert tokenizer.tokenize("ab ab12") == ["ab", "Ġab", "1", "2"]
    assert (
        tokenizer("ab<eos>").input_ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    )
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id) == (0, 1)
    assert tokenizer.decode([1, *tokenizer("ab").input_ids, 2], skip_special_tokens=True) == "ab"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<bos>ab<eos>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gpt2"}, "general.architecture is 'gpt2'; only 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm'"),
        ({"extra_tensor": "blk.1.ffn_gate_inp.weight"}, "'blk.1.ffn_gate_inp.weight' has no"),
    ],
)
def test_what_would_be_dropped_or_misread_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        converted(tmp_path, random_model(tied=True), **options)
