"""Layer: pure. What Megatron-LM folders are refused, and that none of their files runs code."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.safe_loading import UnsafeCheckpointError
from megatron_rl.convert.__main__ import main
from megatron_rl.convert.megatron_lm import MegatronLMFolder, is_megatron_lm
from megatron_rl.convert.megatron_lm.arguments import architecture_of, arguments_of
from megatron_rl.convert.megatron_lm.locate import find_iteration
from megatron_rl.convert.megatron_lm.plain_pickle import read_plain
from megatron_rl.models.architecture import Architecture, Rope
from tests.planted_code import Plant, name_as_pickle

BASE = dict(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, kv_channels=16,
    num_query_groups=2, group_query_attention=True, max_position_embeddings=64,
    padded_vocab_size=256, normalization="RMSNorm", position_embedding_type="rope", swiglu=True,
    add_bias_linear=False, rotary_base=10000, untie_embeddings_and_output_weights=True,
)  # fmt: skip


def read(**changes) -> Architecture:
    return architecture_of(argparse.Namespace(**BASE | changes), source=Path("common.pt"))


def test_everything_that_is_missing_here_is_one_list():
    with pytest.raises(ValueError) as error:
        read(
            normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False,
            add_bias_linear=True, multi_latent_attention=True, num_experts=8, mtp_num_layers=1,
            hybrid_override_pattern="M*M*", rotary_percent=0.5, window_size=(128, 0),
        )  # fmt: skip
    text = str(error.value)
    for part in (
        "LayerNorm", "learned_absolute", "SwiGLU", "biases in all", "MLA", "8 experts",
        "multi-token", "Mamba", "rotary_percent 0.5", "windowed attention (128, 0)",
    ):  # fmt: skip
        assert part in text, part
    assert "\n" not in text and text.startswith("common.pt: this model can't be built here")


@pytest.mark.parametrize("changes, says", [
    (dict(num_layers=None), "argument num_layers is None"),
    (dict(hidden_size="64"), "argument hidden_size is '64'"),
    (dict(add_qkv_bias=True, qk_layernorm=True), "query biases together with query norms"),
    (dict(use_rope_scaling=True, rotary_seq_len_interpolation_factor=2), "two scalings"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        read(**changes)


def test_arguments_become_an_architecture():
    assert read().family == "llama" and read().kv_heads == 2 and read().norm_eps == 1e-5
    assert read(add_qkv_bias=True).family == "qwen2"
    assert read(qk_layernorm=True, norm_epsilon=1e-6).norm_eps == 1e-6
    assert read(group_query_attention=False).kv_heads == 4
    assert read(untie_embeddings_and_output_weights=False).tied
    assert read(use_rope_scaling=True, rope_scaling_factor=32.0).rope.factor == 32.0
    assert read(rotary_seq_len_interpolation_factor=4).rope.kind == "linear"


@pytest.mark.parametrize("changes, vocab", [
    (dict(), 256), (dict(vocab_size=200), 200), (dict(vocab_size=256), 256),
    (dict(vocab_size=100), 256),  # further from 256 than any padding: something else is meant
    (dict(vocab_size=100, tensor_model_parallel_size=2), 100),
    (dict(vocab_size=200, tokenizer_type="NullTokenizer"), 201),
])  # fmt: skip
def test_padding_is_cut_where_the_true_size_is_known(changes, vocab):
    assert read(**changes).vocab == vocab


@pytest.mark.parametrize("rope", [
    Rope(theta=5e5), Rope(theta=1e4, kind="linear", factor=2.0),
    Rope(theta=5e5, kind="llama3", factor=8.0),
])  # fmt: skip
@pytest.mark.parametrize("tied, bias, norm", [(True, True, False), (False, False, True)])
def test_written_arguments_are_read_as_the_same_architecture(rope, tied, bias, norm):
    family = "qwen2" if bias else "qwen3"
    arch = Architecture(
        family=family, hidden=96, layers=3, heads=6, kv_heads=6, head_dim=32, ffn=80, vocab=300,
        tied=tied, norm_eps=1e-6, max_positions=128, rope=rope, qkv_bias=bias, qk_norm=norm,
    )  # fmt: skip
    arguments = arguments_of(arch, iteration=3, dtype=torch.bfloat16, tokenizer=True)
    assert architecture_of(arguments, source=Path("x")) == arch
    assert arguments.padded_vocab_size == 384 and arguments.bf16


def test_a_rope_that_megatron_has_no_arguments_for_is_refused():
    rope = Rope(kind="llama3", factor=8.0, original_max_positions=4096)
    arch = Architecture(
        family="llama", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256,
        tied=True, norm_eps=1e-5, max_positions=64, rope=rope,
    )  # fmt: skip
    with pytest.raises(ValueError, match="4096"):
        arguments_of(arch, iteration=0, dtype=torch.float32, tokenizer=False)


def legacy(folder: Path, **state) -> Path:
    place = folder / "iter_0000001" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"args": argparse.Namespace(**BASE), "model": {}, **state},
               place / "model_optim_rng.pt")  # fmt: skip
    return folder / "iter_0000001"


@pytest.mark.parametrize("text, says", [
    (None, "name one of its folders: iter_0000001"), ("x", "must be a whole number or 'release'"),
    ("9", "names iter_0000009, but there is no folder"), ("release", "names release"),
])  # fmt: skip
def test_a_tracker_that_leads_nowhere(tmp_path, text, says):
    legacy(tmp_path)
    if text is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert is_megatron_lm(tmp_path)
    with pytest.raises(ValueError, match=says):
        find_iteration(tmp_path)


def test_a_release_is_followed(tmp_path):
    legacy(tmp_path).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert find_iteration(tmp_path) == (tmp_path / "release", "torch")


def test_fsdp_dtensor_is_refused_with_the_way_to_convert_it(tmp_path):
    import torch.distributed.checkpoint as torch_checkpoint

    torch_checkpoint.save({"x": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert is_megatron_lm(tmp_path)
    with pytest.raises(ValueError, match="fsdp_dtensor.*--output-format torch_dist"):
        MegatronLMFolder(tmp_path, "actor")


@pytest.mark.parametrize("state, says", [
    (dict(args=None), "has no 'args'"),
    (dict(model={"language_model": {}}), "before Megatron-Core"),
    (dict(model=3), "holds no model"),
    (dict(model={"decoder.layers.0.x": torch.zeros(2)}), "unexpected decoder.layers.0.x"),
])  # fmt: skip
def test_other_contents_are_refused(tmp_path, state, says):
    folder = legacy(tmp_path, **state)
    with pytest.raises(ValueError, match=says):
        MegatronLMFolder(folder, "actor").check()


def test_a_missing_rank_and_expert_ranks(tmp_path):
    folder = legacy(tmp_path)
    (folder / "mp_rank_00").rename(folder / "mp_rank_01")
    with pytest.raises(ValueError, match="lacks the files of the ranks mp_rank_00_000"):
        MegatronLMFolder(folder, "actor")
    (folder / "mp_rank_01").rename(folder / "mp_rank_00_000_001")
    with pytest.raises(ValueError, match="expert parallel"):
        MegatronLMFolder(folder, "actor")


@pytest.mark.parametrize("place", ["args", "model", "rng_state"])
def test_a_plant_in_a_legacy_file_is_refused(tmp_path, marker, place, capsys):
    legacy(tmp_path, **{place: Plant(marker)})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(UnsafeCheckpointError, match="no part of a Megatron-LM checkpoint"):
        MegatronLMFolder(tmp_path, "actor")
    command = ["megatron-lm-to-hf", "--from", str(tmp_path), "--to", str(tmp_path / "out")]
    assert main(command) == 2 and "made to run code" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["common.pt", ".metadata", "a chunk"])
def test_a_plant_in_a_torch_dist_folder_is_refused(tmp_path, tiny_model, marker, place):
    source, folder = tiny_model("llama"), tmp_path / "lm"
    assert main(["hf-to-megatron", "--from", str(source), "--to", str(tmp_path / "m")]) == 0
    assert main(["megatron-to-megatron-lm", "--from", str(tmp_path / "m"), "--to",
                 str(folder)]) == 0  # fmt: skip
    iteration = folder / "iter_0000000"
    MegatronLMFolder(folder, "actor").check()
    if place == "common.pt":
        torch.save({"args": argparse.Namespace(**BASE), "x": Plant(marker)}, iteration / place)
    elif place == ".metadata":
        (iteration / place).write_bytes(pickle.dumps(Plant(marker)))
    else:
        file = next(iteration.glob("__0_0.distcp"))
        torch.save(Plant(marker), file)
    with pytest.raises(ValueError):
        found = MegatronLMFolder(folder, "actor")
        for name, info in found.tensors().items():
            found.read_into(name, torch.empty(info.shape))


@pytest.mark.parametrize("module, name", [
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"),
    ("torch._utils", "_import_dotted_name"), ("subprocess", "Popen"), ("torch", "hub.load"),
    ("numpy", "load"), ("megatronx", "f"), ("torch.storage", "_load_from_bytes"),
])  # fmt: skip
def test_names_outside_the_list_are_refused(tmp_path, module, name):
    import zipfile

    path = tmp_path / "common.pt"
    torch.save({"x": 1}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in entries.items():
            planted = entry.endswith("data.pkl")
            archive.writestr(entry, name_as_pickle(module, name) if planted else data)
    with pytest.raises(UnsafeCheckpointError, match="no part of a Megatron-LM checkpoint"):
        read_plain(path)


def test_known_classes_become_placeholders(tmp_path):
    """Also where Megatron-LM is not installed: its classes are neither imported nor called."""
    import sys
    import types

    class RerunMode:
        def __reduce__(self):
            return RerunMode, ()

    module = types.ModuleType("megatron.training.of_a_later_version")
    RerunMode.__module__, RerunMode.__qualname__ = module.__name__, "RerunMode"
    module.RerunMode = RerunMode
    sys.modules[module.__name__] = module
    try:
        torch.save({"mode": RerunMode(), "n": 3, "w": torch.arange(4)}, tmp_path / "f.pt")
    finally:
        del sys.modules[module.__name__]
    found = read_plain(tmp_path / "f.pt", mmap=True)
    assert type(found["mode"]).__name__ == "Placeholder"
    assert found["n"] == 3 and found["w"].tolist() == [0, 1, 2, 3]


def test_damaged_and_ancient_files(tmp_path):
    path = tmp_path / "f.pt"
    with pytest.raises(ValueError, match="is missing"):
        read_plain(path)
    torch.save({"x": 1}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="before 1.6"):
        read_plain(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        read_plain(path)
