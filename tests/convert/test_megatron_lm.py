"""Layer: gloo ranks. Folders that Megatron-Core wrote at TP2 PP2 are read, and ours by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.convert.__main__ import main
from megatron_rl.convert.kinds import kind_of, open_model
from megatron_rl.convert.megatron_lm import MegatronLMFolder
from megatron_rl.convert.model_folder import whole
from tests.convert import megatron_lm_case as case
from tests.rank_pool import RankPools


@pytest.fixture(scope="module")
def core():
    """Ranks whose global groups are Megatron's own."""
    pools = RankPools()
    yield lambda fn, *args: pools(4, fn, *args)
    pools.close()


@pytest.fixture(scope="module")
def written(core, tmp_path_factory):
    """(folder with one Megatron-LM folder per name, logits by model)."""
    root = tmp_path_factory.mktemp("megatron_lm")
    return root, core(case.write_all, root)[-1]


def transformers_logits(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(case.tokens()).logits[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected[:, : found.shape[1]], atol=2e-4, rtol=2e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", case.MODELS)
def test_an_export_computes_what_megatron_computes(written, tmp_path, name):
    """Megatron-LM → Hugging Face; transformers and Megatron-Core have no code in common."""
    root, logits = written
    target = tmp_path / "hf"
    assert main(["megatron-lm-to-hf", "--from", str(root / name), "--to", str(target)]) == 0
    config = json.loads((target / "config.json").read_text())
    assert config["vocab_size"] == case.MODELS[name]["vocab_size"], "the padding is cut"
    assert logits[name].std() > 0.5
    assert_close(transformers_logits(target), logits[name])


def our_logits(rank, world, path, tp, pp):
    from megatron_rl.convert.load import load_weights
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_only
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=world, tp=tp, pp=pp))
    seed_model_parallel(0, groups)
    folder = open_model(path, "actor")
    folder.check()
    model = build_model("actor", folder.architecture, groups)
    load_weights(model, folder)
    outputs = forward_only(
        model, [pack([case.tokens()[0]], [0], model=model)], lambda logits, batch: logits
    )
    if not groups.is_last_stage:
        return None
    (found,) = outputs
    parts = [torch.empty_like(found) for _ in range(tp)]
    torch.distributed.all_gather(parts, found, group=groups.tp)
    return torch.cat(parts, dim=-1)


@pytest.mark.ranks
@pytest.mark.parametrize("name, tp, pp", [("llama", 2, 1), ("qwen2_fused", 1, 2)])
def test_our_models_load_their_slices(ranks, written, name, tp, pp):
    root, logits = written
    found = ranks(2, our_logits, root / name, tp, pp)[-1]
    vocab = case.MODELS[name.split("_")[0]]["vocab_size"]
    assert_close(found[: case.tokens().shape[1], :vocab], logits[name.split("_")[0]])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "other, name",
    [("llama_legacy", "llama"), ("llama_fused", "llama"), ("numbered", "llama"),
     ("qwen2_legacy", "qwen2"), ("qwen2_fused", "qwen2"), ("vpp_legacy", "vpp")],
)  # fmt: skip
def test_every_format_holds_the_same(written, other, name):
    """`torch` files of each rank, virtual stages and TE names give torch_dist's tensors."""
    root, _ = written
    one, two = MegatronLMFolder(root / name, "actor"), MegatronLMFolder(root / other, "actor")
    for folder in (one, two):
        folder.check()
    assert one.architecture == two.architecture and one.tensors() == two.tensors()
    for tensor in one.tensors():
        assert torch.equal(whole(one, tensor), whole(two, tensor)), tensor


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "llama_legacy"])
def test_a_rank_reads_its_part(written, name):
    """Every tensor parallel rank's part, as the whole tensor is cut."""
    from megatron_rl.checkpoint.cuts import cut_of, pieces
    from megatron_rl.convert.model_folder import stored_rules

    folder = MegatronLMFolder(written[0] / name, "actor")
    rules = stored_rules(folder.architecture, "lm")
    for tensor, rule in rules.items():
        complete = whole(folder, tensor)
        shape = list(complete.shape)
        axis = cut_of(rule, folder.architecture, tuple(shape), tp=1, rank=0).axis
        if type(rule).__name__ != "Replicated":
            shape[axis] = -(-shape[axis] // 2)
        for rank in range(2):
            part = torch.full(shape, 7.0)
            folder.read_into(tensor, part, tp=2, rank=rank)
            cut = cut_of(rule, folder.architecture, tuple(shape), tp=2, rank=rank)
            for piece in pieces(cut, part.view(-1), 0):
                place = tuple(
                    slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True)
                )
                assert torch.equal(piece.data, complete[place]), (tensor, rank)
            assert not (part == 7.0).any()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_megatron_goes_on_from_what_we_write(core, written, tmp_path, name):
    """Loaded strictly by Megatron-Core at TP2 PP2: the same logits, nothing missing."""
    root, logits = written
    target = tmp_path / "lm"
    assert main(["megatron-lm-to-megatron", "--from", str(root / name), "--to",
                 str(tmp_path / "ours")]) == 0  # fmt: skip
    assert main(["megatron-to-megatron-lm", "--from", str(tmp_path / "ours"), "--to",
                 str(target), "--max-shard-size", "50KB"]) == 0  # fmt: skip
    assert (target / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    assert len(list((target / "iter_0000000").glob("*.distcp"))) > 2
    found, missing, unexpected, common = core(case.load_strictly, target, name, 0)[-1]
    assert unexpected == [] and all("_extra_state" in key for key in missing), (missing, unexpected)
    vocab = case.MODELS[name]["vocab_size"]
    assert_close(found[:, :vocab], logits[name])
    want = case.arguments(name, tp=1, pp=1)
    for key in ("num_layers", "num_query_groups", "rotary_base", "untie_embeddings_and_output_"
                "weights", "add_qkv_bias", "padded_vocab_size", "norm_epsilon"):  # fmt: skip
        assert getattr(common["args"], key) == getattr(want, key), key
    again = MegatronLMFolder(target, "actor")
    again.check()
    source = MegatronLMFolder(root / name, "actor")
    assert again.architecture == source.architecture
    assert all(torch.equal(whole(again, n), whole(source, n)) for n in source.tensors())


@pytest.mark.ranks
def test_a_critic_starts_from_the_trunk_and_a_reward_is_refused(written, tmp_path):
    root, _ = written
    critic = MegatronLMFolder(root / "llama", "critic")
    critic.check()
    assert critic.fresh_head and "output_layer.weight" not in critic.tensors()
    with pytest.raises(ValueError, match="no value head"):
        MegatronLMFolder(root / "llama", "reward")
    assert main(["megatron-lm-to-megatron", "--role", "critic", "--from", str(root / "llama"),
                 "--to", str(tmp_path / "critic")]) == 0  # fmt: skip
    assert main(["megatron-to-megatron-lm", "--from", str(tmp_path / "critic"), "--to",
                 str(tmp_path / "no")]) == 2  # fmt: skip
    assert not (tmp_path / "no").exists()


@pytest.mark.ranks
def test_a_folder_and_its_iteration_are_recognised(written):
    root, _ = written
    for path in (root / "llama", root / "llama" / "iter_0000007", root / "llama_legacy"):
        assert kind_of(path).name == "megatron-lm"
        assert MegatronLMFolder(path, "actor").path.name == "iter_0000007"
    details = MegatronLMFolder(root / "llama", "actor").details()
    assert details["step"] == "7" and details["layout"] == "tp=2 pp=2 cp=1"
    assert details["vocabulary"] == "384 rows, 125 of padding are cut"


@pytest.mark.ranks
def test_inspect_shows_a_folder_and_how_a_run_starts_from_it(written, capsys):
    folder = written[0] / "qwen2_legacy"
    assert main(["inspect", "--from", str(folder)]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 4}
    assert rows["model"].startswith("qwen2") and rows["weights"].endswith("float32")
    assert rows["step"] == "7" and rows["layout"] == "tp=2 pp=2 cp=1"
    assert rows["tokenizer"] == "HuggingFaceTokenizer, no path"
    assert main(["inspect", "--from", str(folder), "--yaml"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["model"]["actor"]["path"] == str(folder / "iter_0000007")
    assert values["parallel"] == {"tp": 2, "pp": 2} and values["training"]["dtype"] == "fp32"


@pytest.mark.ranks
@pytest.mark.parametrize("name, file, tokenizer", [
    ("llama", "common.pt", "."),
    ("llama_legacy", "mp_rank_00_000/model_optim_rng.pt", "tokenizer.json"),
])  # fmt: skip
def test_the_tokenizer_is_the_one_that_the_stored_arguments_name(
    written, tiny_model_dir, tmp_path, name, file, tokenizer
):
    """As `--tokenizer-model` gave it: a folder, or a file in it."""
    source, target = tmp_path / "lm", tmp_path / "hf"
    shutil.copytree(written[0] / name, source)
    stored = torch.load(source / "iter_0000007" / file, weights_only=False)
    stored["args"].tokenizer_model = str(tiny_model_dir / tokenizer)
    torch.save(stored, source / "iter_0000007" / file)
    assert main(["megatron-lm-to-hf", "--from", str(source), "--to", str(target)]) == 0
    for path in tiny_model_dir.glob("tokenizer*"):
        assert (target / path.name).read_bytes() == path.read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 20000, "that beside the tokenizer says 10000"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_starts_from_a_megatron_lm_folder(ranks, written, tiny_model_dir, tmp_path):
    """All three roles; the first update has ratio one, so the log-probs of both paths agree."""
    from tests.trainer import run_case

    values = run_case.settings(
        str(written[0] / "llama"), tmp_path, model__tokenizer={"path": str(tiny_model_dir)},
        parallel__tp=2, training__epochs=1, training__mini_batch_size=None,
    )  # fmt: skip
    for (metrics,) in ranks(2, run_case.run, values, 1):
        assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    log = (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    assert "weights of iteration 7 alone" in log and "random state start fresh" in log
