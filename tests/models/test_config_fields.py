"""Layer: pure and one rank. Every field of config.json is honoured like transformers, or refused.

For each family, each field that its transformers class knows is flipped in a tiny model's folder:
either our logits equal those of transformers on the same folder, or the message names the field.
A field that a later transformers adds fails the test until somebody decides about it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.models.families import architecture_from_config, read_architecture
from tests.models.test_logits_equal_transformers import our_logits
from tests.tiny_models import edit_config

FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3_moe")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

MOVES: dict[str, list[Any]] = {
    "rms_norm_eps": [0.3],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3,
    ],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, LLAMA3],
}  # fmt: skip
"""Honoured: the logits move, as transformers' do."""
SAME: dict[str, list[Any]] = {
    "max_position_embeddings": [300], "initializer_range": [0.5], "use_cache": [False],
    "pad_token_id": [5], "bos_token_id": [5], "eos_token_id": [5, [5, 6]], "pretraining_tp": [2],
    "max_window_layers": [1], "use_sliding_window": [True], "rope_interleaved": [False],
    "use_mrope": [False], "num_labels": [1], "torch_dtype": ["bfloat16"],
}  # fmt: skip
"""Without effect on the logits (a window that is switched on needs a width to have one)."""
REFUSED: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu"], "attention_bias": [True], "mlp_bias": [True],
    "attention_dropout": [0.1], "layer_types": [["sliding_attention"] * 4],
    "rope_parameters": [
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "longrope", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]},
        {"rope_type": "linear", "rope_theta": 1e4},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
    ],
    "rope_interleaved": [True], "use_mrope": [True], "partial_rotary_factor": [0.5],
    "attn_logit_softcapping": [50.0], "final_logit_softcapping": [30.0],
    "query_pre_attn_scalar": [224], "logit_scale": [0.5], "embedding_multiplier": [12.0],
    "attention_multiplier": [0.1], "residual_multiplier": [0.2], "logits_scaling": [8.0],
    "num_experts": [8], "num_local_experts": [8], "quantization_config": [{"bits": 4}],
}  # fmt: skip
OF_EXPERTS = {
    "MOVES": {"num_experts_per_tok": [1]}, "SAME": {"router_aux_loss_coef": [0.5]},
    "REFUSED": {
        "output_router_logits": [True], "router_jitter_noise": [0.1], "decoder_sparse_step": [2],
        "mlp_only_layers": [[0]], "num_experts_per_tok": [0, 99, "2"],
    },
}  # fmt: skip
"""Fields of a mixture of experts alone."""
SHAPES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
}  # fmt: skip
"""Decided by the weights: see test_shape_fields_are_checked_against_the_weights."""
EXPERT_SHAPES = {"num_experts", "num_local_experts", "moe_intermediate_size"}
ELSEWHERE = {"sliding_window", "tie_word_embeddings"}  # tests of their own below


def table(name: str, which: str) -> dict[str, list[Any]]:
    """Fields of a family and the values to try."""
    fields = dict({"MOVES": MOVES, "SAME": SAME, "REFUSED": REFUSED}[which])
    if name in EXPERTS:
        fields = {k: v for k, v in fields.items() if k not in EXPERT_SHAPES}
        fields |= OF_EXPERTS[which]
    if name == "qwen3_moe" and which == "MOVES":
        fields["norm_topk_prob"] = [False]
    return fields


def flipped(source: Path, folder: Path, field: str, value: Any) -> Path:
    """A folder that shares the weights of `source`, with another config.json."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text((source / "config.json").read_text())
    edit_config(folder, **{field: value})
    return folder


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 256, (n,), generator=generator) for n in (24, 3)]


def all_logits(rank, world, folders):
    """Our logits of several model folders, computed one after the other."""
    return [our_logits(0, 1, f, 1, 1, 1, False, seqs=prompts())[:-1] for f in folders]


def transformers_logits(folder: Path) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(ids[None]).logits[0] for ids in prompts()]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_is_decided(name):
    known = set(getattr(transformers, f"{FAMILIES[name]}Config")().to_dict())
    base = set(transformers.PretrainedConfig().to_dict())
    decided = SHAPES | ELSEWHERE | (EXPERT_SHAPES if name in EXPERTS else set())
    decided = decided.union(*(table(name, which) for which in ("MOVES", "SAME", "REFUSED")))
    assert known - base <= decided, f"decide about {sorted(known - base - decided)}"


@pytest.mark.ranks
@pytest.mark.parametrize("name", FAMILIES)
def test_flipped_fields_do_what_transformers_does(ranks, tiny_model, tmp_path, name):
    source = tiny_model(name)
    cases = [(f, v, True) for f, values in table(name, "MOVES").items() for v in values]
    cases += [(f, v, False) for f, values in table(name, "SAME").items() for v in values]
    folders = [
        flipped(source, tmp_path / str(i), field, value)
        for i, (field, value, _) in enumerate(cases)
    ]  # fmt: skip
    usual = transformers_logits(source)
    ours = ranks(1, all_logits, [str(f) for f in folders])[0]
    for (field, value, moves), folder, got in zip(cases, folders, ours, strict=True):
        expected = transformers_logits(folder)
        moved = max(float((a - b).abs().max()) for a, b in zip(expected, usual, strict=True))
        assert (moved > 1e-3) == moves, f"transformers: {field}={value} moves by {moved}"
        for mine, want in zip(got, expected, strict=True):
            torch.testing.assert_close(
                mine[: len(want)], want, atol=1e-4, rtol=1e-4, msg=lambda m, f=field: f"{f}: {m}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_unsupported_values_are_refused_by_name(tiny_model, name):
    config = json.loads((tiny_model(name) / "config.json").read_text())
    for field, values in table(name, "REFUSED").items():
        for value in values:
            with pytest.raises(ValueError) as refusal:
                architecture_from_config(config | {field: value}, source="config.json")
            named = "rope" if field == "rope_parameters" else field
            message = str(refusal.value)
            if field == "rope_parameters" and value["rope_type"] in ("linear", "llama3"):
                named = "factor" if value["rope_type"] == "linear" else "low_freq_factor"
            assert "config.json" in message and named in message, message


WRONG = [
    ("hidden_size", "64"), ("num_hidden_layers", 0), ("vocab_size", True), ("head_dim", 2.5),
    ("rms_norm_eps", "small"), ("rms_norm_eps", -1e-5), ("tie_word_embeddings", "false"),
    ("rope_theta", "1e4"), ("num_key_value_heads", 3), ("max_position_embeddings", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_types_are_refused_by_name(tiny_model, field, value):
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    config.pop("rope_parameters")
    with pytest.raises(ValueError, match=field):
        architecture_from_config(config | {field: value}, source="config.json")


def load_messages(rank, world, folders):
    """What refuses to load each folder; None where nothing does."""
    messages = []
    for folder in folders:
        try:
            our_logits(0, 1, folder, 1, 1, 1, False, seqs=prompts())
            messages.append(None)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_shape_fields_are_checked_against_the_weights(ranks, tiny_model, tmp_path, name):
    source = tiny_model(name)
    config = json.loads((source / "config.json").read_text())
    fields = sorted(SHAPES)
    if name == "qwen3_moe":  # its dense layers' size says nothing about its experts
        fields = sorted(SHAPES - {"intermediate_size"} | {"num_local_experts",
                                                          "moe_intermediate_size"})  # fmt: skip
    folders = [str(flipped(source, tmp_path / f, f, config[f] * 2)) for f in fields]
    for field, message in zip(fields, ranks(1, load_messages, folders)[0], strict=True):
        assert message is not None and ("the shape" in message or "missing" in message), field


@pytest.mark.ranks
def test_tied_embeddings_follow_the_file_or_are_refused(ranks, tiny_model, tmp_path):
    """A flag that contradicts the weights is refused: transformers 4 and 5 read it differently."""
    from safetensors.torch import load_file, save_file

    source = tiny_model("llama")
    contradicts = flipped(source, tmp_path / "contradicts", "tie_word_embeddings", True)
    message = ranks(1, load_messages, [str(contradicts)])[0][0]
    assert "tie_word_embeddings" in message and "lm_head.weight" in message
    tensors = load_file(source / "model.safetensors")
    usual = transformers_logits(source)
    for name, change in (("twice", tensors["model.embed_tokens.weight"].clone()), ("once", None)):
        folder = flipped(source, tmp_path / name, "tie_word_embeddings", True)
        tied = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
        tied |= {} if change is None else {"lm_head.weight": change}
        (folder / "model.safetensors").unlink()
        save_file(tied, folder / "model.safetensors", metadata={"format": "pt"})
        expected = transformers_logits(folder)
        assert (expected[0] - usual[0]).abs().max() > 1e-3
        ours = ranks(1, all_logits, [str(folder)])[0][0]
        torch.testing.assert_close(ours[0][:24], expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("mistral", {"sliding_window": 20}),
     ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 2}),
     ("qwen3", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 0}),
     ("mixtral", {"sliding_window": 20}),
     ("qwen3_moe", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 0})],
)  # fmt: skip
def test_a_sliding_window_limits_the_context(ranks, tiny_model, tmp_path, name, fields):
    """Inside the window the functions are equal; longer sequences are not let in."""
    folder = flipped(tiny_model(name), tmp_path / "window", "layer_types", None)
    edit_config(folder, **fields)
    assert read_architecture(folder).max_positions == 20
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        inside = (model(ids[:, :20]).logits - plain(ids[:, :20]).logits).abs().max()
        outside = (model(ids).logits - plain(ids).logits).abs().max()
    assert inside < 1e-5 and outside > 1e-3


def test_a_window_that_is_off_or_unknown_changes_nothing(tiny_model):
    for name, fields in (
        ("qwen2", {"sliding_window": 20}), ("llama", {"sliding_window": 20}),
        ("mistral", {"sliding_window": None}),
    ):  # fmt: skip
        config = json.loads((tiny_model(name) / "config.json").read_text()) | fields
        assert architecture_from_config(config, source="").max_positions == 512


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "field", ["num_key_value_heads", "head_dim", "sliding_window", "rms_norm_eps", "hidden_act",
              "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
              "rope_theta"],
)  # fmt: skip
def test_a_missing_field_means_what_transformers_assumes(name, field):
    values = {
        "model_type": name, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 500,
        "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 9000,
        "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 100, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "use_sliding_window": True, "rope_theta": 5e5,
    }  # fmt: skip
    values.pop(field)
    ours = architecture_from_config(values, source="")
    theirs = getattr(transformers, f"{FAMILIES[name]}Config")(**values)
    window = getattr(theirs, "sliding_window", None) if name != "llama" else None
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.norm_eps == theirs.rms_norm_eps and ours.tied == theirs.tie_word_embeddings
    assert ours.max_positions == min(9000, window or 9000)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", EXPERTS)
def test_missing_fields_of_experts_mean_what_transformers_assumes(name):
    values = {
        "model_type": name, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500,
        "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 9000,
        "num_key_value_heads": 2,
    }  # fmt: skip
    ours = architecture_from_config(values, source="")
    theirs = getattr(transformers, f"{FAMILIES[name]}Config")(**values)
    assert ours.experts.count == theirs.num_local_experts
    assert ours.experts.per_token == theirs.num_experts_per_tok
    assert ours.experts.normalised == getattr(theirs, "norm_topk_prob", True)
    assert ours.ffn == getattr(theirs, "moe_intermediate_size", 96)


# Fields of published config.json files that a reader of this family meets.
PUBLISHED = {
    "Llama 2": {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None,
                "num_key_value_heads": 32, "torch_dtype": "float16"},
    "Llama 3": {"model_type": "llama", "rope_theta": 500000.0, "num_key_value_heads": 8,
                "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None},
    "Llama 3.1": {"model_type": "llama", "rope_theta": 500000.0, "mlp_bias": False,
                  "eos_token_id": [128001, 128008, 128009], "num_key_value_heads": 8,
                  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 8192,
                                   "rope_type": "llama3"}},
    "Llama 3.2": {"model_type": "llama", "head_dim": 64, "tie_word_embeddings": True,
                  "rope_theta": 500000.0,
                  "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 8192,
                                   "rope_type": "llama3"}},
    "SmolLM2": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False,
                "rope_theta": 100000, "transformers.js_config": {"kv_cache_dtype": {}}},
    "Mistral 7B": {"model_type": "mistral", "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2.5": {"model_type": "qwen2", "max_window_layers": 21, "sliding_window": 32768,
                "use_sliding_window": False, "use_mrope": False, "rope_theta": 1000000.0},
    "Mixtral 8x7B": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
                     "num_key_value_heads": 8, "output_router_logits": False,
                     "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
                     "sliding_window": None, "attention_dropout": 0.0},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
                      "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [],
                      "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
                      "num_experts_per_tok": 8, "num_key_value_heads": 4,
                      "output_router_logits": False, "router_aux_loss_coef": 0.001,
                      "rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
    "Qwen3": {"model_type": "qwen3", "attention_bias": False, "head_dim": 128,
              "max_window_layers": 28, "rope_scaling": None, "sliding_window": None,
              "use_sliding_window": False, "rope_theta": 1000000},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
    common = {
        "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 500, "num_hidden_layers": 2,
        "intermediate_size": 64, "max_position_embeddings": 32768, "hidden_act": "silu",
        "initializer_range": 0.02, "rms_norm_eps": 1e-5, "use_cache": True,
        "transformers_version": "4.40.0", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    architecture = architecture_from_config(common | PUBLISHED[name], source="")
    assert architecture.max_positions == (4096 if name == "Mistral 7B" else 32768)
    assert architecture.rope.kind == ("llama3" if name in ("Llama 3.1", "Llama 3.2") else "default")


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "gemma3_text", "phi3", "gpt2"])
def test_other_families_are_refused_with_the_known_ones(kind):
    known = "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"
    with pytest.raises(ValueError, match=f"'{kind}'.*{known}"):
        architecture_from_config({"model_type": kind}, source="config.json")
