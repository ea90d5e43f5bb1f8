"""Layer: gloo ranks. A learned reward model scores as transformers does, on every layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.generation.sequence import Response
from megatron_rl.rollout.batch import RolloutBatch, make_batch
from megatron_rl.rollout.prompts import Prompt
from tests.tiny_models import edit_config, write_tiny_reward_model
from tests.trainer import run_case

PAD, END, OTHER_END = 258, 257, 256
LAYOUTS = {
    "tp1": (1, {}), "tp2_sp": (2, dict(tp=2, sp=True)), "pp2": (2, dict(pp=2)),
    "pp2_vpp2": (2, dict(pp=2, vpp=2)), "tp2_pp2": (4, dict(tp=2, pp=2, sp=True)),
}  # fmt: skip


def random_batch(seed: int) -> RolloutBatch:
    """Samples of all lengths: cut by the limit, ended by either end token, and one of one token."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses, texts = [], [], []
    for i, (prompt, response) in enumerate([(3, 9), (1, 1), (7, 4), (5, 1), (12, 2), (2, 6)]):
        ids = torch.randint(0, 256, (prompt + response,), generator=generator).tolist()
        end = (None, END, OTHER_END)[i % 3]
        if end is not None:
            ids[-1] = end
        prompts.append(Prompt(index=i, text="", token_ids=ids[:prompt], record={}))
        responses.append(
            Response(
                request=i, prompt_ids=ids[:prompt], token_ids=ids[prompt:],
                logprobs=[0.0] * response, full_logprobs=[0.0] * response,
                finish_reason="length" if end is None else "stop",
            )
        )  # fmt: skip
        texts.append("")
    return make_batch(prompts, responses, texts, list(range(len(prompts))))


def our_scores(rank, world, folder, seed, pad_id, tp=1, pp=1, vpp=1, sp=False, **training):
    from megatron_rl import Config
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel
    from megatron_rl.rewards.model import SampleReader, learned_scores

    groups = ParallelGroups(layout=Layout(world_size=world, tp=tp, pp=pp, vpp=vpp))
    seed_model_parallel(0, groups)
    model = build_model("reward", read_architecture(folder), groups, sp=sp)
    load_huggingface(model, folder)
    config = Config.from_dict({
        "model": {"actor": {"path": folder}}, "data": {"train": "none"},
        "training": training or {"micro_batch_size": 4},
    })  # fmt: skip
    reader = SampleReader(tokenizer=None, chat_key=None, pad_id=pad_id, max_positions=512)
    return learned_scores(random_batch(seed), model, reader, config)


def transformers_scores(folder: Path, sequences: list[Tensor], side: str) -> Tensor:
    """Scores of one padded batch, on either side, by the model's own rule."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    )
    assert model.config.num_labels == 1
    width, pad = max(len(s) for s in sequences), model.config.pad_token_id
    ids_BL = torch.full((len(sequences), width), pad)
    mask_BL = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, ids in enumerate(sequences):
        place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        ids_BL[row, place], mask_BL[row, place] = ids, 1
    positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids_BL, attention_mask=mask_BL, position_ids=positions_BL).logits[:, 0]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trunk", ["llama_tied", "qwen2"])
def test_scores_equal_transformers(ranks, tiny_model, tmp_path, layout, trunk):
    folder = write_tiny_reward_model(tiny_model(trunk), tmp_path / "reward")
    world, layout_args = LAYOUTS[layout]
    expected = transformers_scores(folder, random_batch(5).sequences, "left")
    torch.testing.assert_close(
        expected, transformers_scores(folder, random_batch(5).sequences, "right"),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip
    budget = {"max_tokens_per_micro_batch": 20} if trunk == "qwen2" else {}
    for scores in ranks(world, _with, our_scores, (str(folder), 5, PAD), layout_args | budget):
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1, "scores differ enough to notice a wrong row"


def _with(rank, world, fn, args, kwargs):
    return fn(rank, world, *args, **kwargs)


@pytest.mark.ranks
def test_a_pad_token_that_ends_responses_is_not_read(ranks, tiny_model, tmp_path):
    """transformers skips trailing pad tokens, also where the pad token is the end token."""
    folder = write_tiny_reward_model(tiny_model("llama"), tmp_path / "reward", pad_token_id=END)
    sequences = random_batch(6).sequences
    expected = transformers_scores(folder, sequences, "right")
    scores = ranks(1, our_scores, str(folder), 6, END)[0]
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    at_the_end = ranks(1, our_scores, str(folder), 6, None)[0]
    differs = [bool(s[-1] == END) for s in sequences]
    assert ((scores - at_the_end).abs() > 1e-3).tolist() == differs and any(differs)


def constant(prompts, responses, records, value):
    return [value] * len(responses)


def twice_the_model(prompts, responses, records, model_scores):
    assert len(model_scores) == len(responses)
    return [2.0 * score for score in model_scores]


def rollout_scores(rank, world, values):
    """One step's rewards, the model's scores and the samples, of a whole run."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        batch, _ = trainer.rollout.draw_step()
        trainer._evaluate_policies(batch)
        questions = [p.text for p in batch.prompts]
        texts = list(zip(questions, batch.texts, strict=True))
        return batch.scores_B, batch.tensors["model_scores"], batch.sequences, texts
    finally:
        trainer.close()


def own(function: str) -> str:
    return f"tests.rewards.test_reward_model:{function}"


@pytest.mark.ranks
@pytest.mark.slow
def test_function_and_model_add_up_or_the_function_decides(ranks, tiny_model, tmp_path):
    actor = str(tiny_model("llama"))
    folder = write_tiny_reward_model(tiny_model("mistral"), tmp_path / "reward")
    common = {"model__reward": {"path": str(folder)}, "parallel__tp": 2, "parallel__sp": True}
    for reward, expected in (
        ({}, lambda m: m),
        ({"function": own("constant"), "kwargs": {"value": 3.5}}, lambda m: m + 3.5),
        ({"function": own("twice_the_model")}, lambda m: 2 * m),
    ):
        values = run_case.settings(actor, tmp_path, reward=reward, **common)
        for scores, learned, sequences, _ in ranks(2, rollout_scores, values):
            torch.testing.assert_close(scores, expected(learned))
            assert scores.dtype == torch.float32
            want = transformers_scores(folder, sequences, "right")
            torch.testing.assert_close(learned, want, atol=1e-4, rtol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_four_models_train_together(ranks, tiny_model, tmp_path, layout):
    """PPO with a learned reward has the same metrics on one rank and on two."""
    folder = write_tiny_reward_model(tiny_model("llama"), tmp_path / "reward")
    edit_config(folder, pad_token_id=END)
    changes = {"model__reward": {"path": str(folder)}, "reward": {}}
    split = {"parallel__pp": 2} if layout == "pp2" else {}
    values = run_case.settings(str(tiny_model("llama")), tmp_path, **changes)
    expected = ranks(1, run_case.run, values, 2)[0]
    values = run_case.settings(str(tiny_model("llama")), tmp_path, **changes, **split)
    for got in ranks(2, run_case.run, values, 2):
        for mine, theirs in zip(got, expected, strict=True):
            assert mine["reward/model_mean"] == pytest.approx(mine["reward/mean"], abs=1e-6)
            for name in ("reward/mean", "reward/std", "value/loss", "policy/loss", "kl/ref"):
                assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name


def test_evaluation_uses_the_learned_reward(ranks, tiny_model, tmp_path):
    folder = write_tiny_reward_model(tiny_model("llama"), tmp_path / "reward")
    values = run_case.settings(
        str(tiny_model("llama")), tmp_path, model__reward={"path": str(folder)}, reward={},
        algorithm__name="grpo",
    )  # fmt: skip
    metrics = ranks(1, evaluate, values)[0]
    assert abs(metrics["eval/reward_mean"]) > 1e-3 and metrics["eval/prompts"] == 8


def evaluate(rank, world, values):
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        return trainer.evaluate()
    finally:
        trainer.close()


# ---- another tokenizer ---------------------------------------------------------------------------


def write_word_tokenizer(folder: Path, *, template: str | None = None, extra: int = 0) -> None:
    """Letters and blanks one by one, ids from the other end than the actor's bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<s>": 256, "<x>": 257}
    vocab |= {f"<extra{i}>": 258 + i for i in range(extra)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def with_chat_template(model: Path, folder: Path) -> Path:
    """A copy of a model folder whose tokenizer has a chat template."""
    import transformers

    shutil.copytree(model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


TEMPLATE = "{% for m in messages %}<x>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"


@pytest.mark.ranks
@pytest.mark.parametrize("chat", [False, True])
def test_another_tokenizer_reads_the_text_anew(ranks, tiny_model, tmp_path, chat):
    import transformers

    folder = write_tiny_reward_model(tiny_model("mistral"), tmp_path / "reward")
    write_word_tokenizer(folder, template=TEMPLATE)
    actor = with_chat_template(tiny_model("llama"), tmp_path / "actor")
    values = run_case.settings(
        str(actor), tmp_path, model__reward={"path": str(folder)}, reward={},
        data__chat_template=chat,
    )  # fmt: skip
    _, learned, _, texts = ranks(1, rollout_scores, values)[0]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = []
    for question, text in texts:
        whole = f"<x>user:{question}<x>assistant:{text}" if chat else question + text
        ids = theirs(whole, add_special_tokens=not chat)["input_ids"]
        encoded.append(torch.tensor(ids))
    want = transformers_scores(folder, encoded, "right")
    torch.testing.assert_close(learned, want, atol=1e-4, rtol=1e-4)


# ---- refusals ------------------------------------------------------------------------------------


def _checked(actor: Path, folder: Path, tmp_path: Path, **changes):
    from megatron_rl import Config
    from megatron_rl.run_inputs import RunInputs

    values = run_case.settings(
        str(actor), tmp_path, model__reward={"path": str(folder)}, **{"reward": {}} | changes
    )
    return RunInputs.check(Config.from_dict(values), None)


def test_own_tokenizer_is_used_only_where_it_differs(tiny_model, tmp_path):
    actor = tiny_model("llama")
    folder = write_tiny_reward_model(actor, tmp_path / "reward")
    reader = _checked(actor, folder, tmp_path).reward_reader
    assert reader.tokenizer is None and reader.pad_id == PAD
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert _checked(actor, folder, tmp_path).reward_reader.tokenizer is None
    write_word_tokenizer(folder)
    assert _checked(actor, folder, tmp_path).reward_reader.tokenizer is not None


def _no_head(model: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(model, folder)


def _renamed_head(model: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["judge.weight"] = tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors")


def _two_labels(model: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
    save_file(tensors, folder / "model.safetensors")


BAD = {
    "no_head": (_no_head, {}, ["missing score.weight", "scalar head", "rewards.fit"]),
    "renamed_head": (_renamed_head, {}, ["missing score.weight", "unexpected judge.weight"]),
    "two_labels": (_two_labels, {}, ["score.weight", "shape (2, 64)", "(1, 64)"]),
    "large_tokenizer": (
        lambda m, f: write_word_tokenizer(f, extra=9), {}, ["267 tokens", "has 259"]
    ),
    "no_template": (
        lambda m, f: write_word_tokenizer(f), {"data__chat_template": True},
        ["no chat template", "data.chat_template=false"],
    ),
    "short_context": (
        lambda m, f: edit_config(f, max_position_embeddings=40), {"rollout__max_length": 64},
        ["at most 40 tokens", "may have 64", "rollout.max_length"],
    ),
    "idle_kwargs": (lambda m, f: None, {"reward": {"kwargs": {"a": 1}}}, ["reward.kwargs"]),
    "layout": (
        lambda m, f: edit_config(f, num_hidden_layers=3), {"parallel__pp": 2},
        ["the reward", "3 layers"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_reward_model_that_does_not_fit_is_refused(tiny_model, tmp_path, case):
    from megatron_rl import ConfigError

    damage, changes, parts = BAD[case]
    actor = tiny_model("llama")
    folder = write_tiny_reward_model(actor, tmp_path / "reward")
    damage(actor, folder)
    if changes.get("data__chat_template"):
        actor = with_chat_template(actor, tmp_path / "actor")
    with pytest.raises(ConfigError) as refusal:
        _checked(actor, folder, tmp_path, **changes)
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_scores_without_a_model_name_the_missing_setting(tiny_model, tmp_path):
    from megatron_rl import Config, ConfigError
    from megatron_rl.run_inputs import RunInputs

    values = run_case.settings(
        str(tiny_model("llama")), tmp_path, reward={"function": own("twice_the_model")}
    )
    with pytest.raises(ConfigError, match="model_scores needs model.reward.path"):
        RunInputs.check(Config.from_dict(values), None)
