"""Layer: pure. Fitting a reward head: a planted rating is found, and the folder is loadable."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers

from megatron_rl import Config
from megatron_rl.rewards import fit
from megatron_rl.run_inputs import RunInputs
from tests.trainer import run_case

LAYERS = 2


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def random_texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    letters = "abcdefghij ,."
    return ["".join(generator.choices(letters, k=generator.randint(2, 30))) for _ in range(count)]


def planted_ratings(model: Path, texts: list[str]) -> list[float]:
    """A random linear function of the trunk's normed hidden state at the last token."""
    trunk = fit._classifier(model, LAYERS).model
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [
            float(trunk(torch.tensor([tokenizer(t)["input_ids"]])).last_hidden_state[0, -1]
                  @ direction)
            for t in texts
        ]  # fmt: skip


@pytest.fixture(scope="module")
def fitted(tiny_model, tmp_path_factory):
    """(folder, held-out texts, their ratings, exit code) of a fit on a planted rating."""
    model, folder = tiny_model("llama"), tmp_path_factory.mktemp("fit")
    texts = random_texts(500, seed=2)
    ratings = planted_ratings(model, texts)
    rows = [{"review": t, "stars": r} for t, r in zip(texts, ratings, strict=True)]
    code = fit.main([
        "--model", str(model), "--to", str(folder / "reward"), "--layers", str(LAYERS),
        "--train", write_rows(folder / "train.jsonl", rows[:400]), "--batch-tokens", "100",
        "--heldout", write_rows(folder / "heldout.jsonl", rows[400:]),
        "--text-key", "review", "--rating-key", "stars",
    ])  # fmt: skip
    return folder / "reward", texts[400:], torch.tensor(ratings[400:]), code


def test_a_planted_rating_is_found_on_held_out_texts(fitted):
    folder, texts, ratings, code = fitted
    assert code == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.num_hidden_layers == LAYERS
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        scores = torch.cat([model(**tokenizer(t, return_tensors="pt")).logits[0] for t in texts])
    correlation = torch.corrcoef(torch.stack((scores, ratings)))[0, 1]
    assert correlation > 0.95, correlation
    assert fit.sign_accuracy(scores, ratings) > 0.85
    assert (scores - ratings).abs().mean() < 0.3 * ratings.std()


def test_the_result_is_a_reward_model_of_a_run(fitted, tiny_model, tmp_path):
    values = run_case.settings(
        str(tiny_model("llama")), tmp_path, model__reward={"path": str(fitted[0])}, reward={}
    )
    inputs = RunInputs.check(Config.from_dict(values), None)
    assert inputs.architectures["reward"].layers == LAYERS
    assert inputs.reward_reader.tokenizer is None and inputs.reward is None


def test_command_prints_the_held_out_accuracy(tiny_model, tmp_path, capsys):
    rows = [{"text": t, "rating": float(len(t) - 16)} for t in random_texts(60, seed=4)]
    file = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "old").write_text("")
    arguments = ["--model", str(tiny_model("qwen2")), "--train", file, "--heldout", file,
                 "--to", str(tmp_path / "reward"), "--examples", "40"]  # fmt: skip
    assert fit.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "held-out accuracy " in printed and "of 60 texts" in printed
    assert not (tmp_path / "reward" / "old").exists()
    assert json.loads((tmp_path / "reward" / "config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    ("content", "changes", "parts"),
    [
        ('{"text": "a", "rating": 1}\n{"text": "b"}\n', [], ["row 2", "'rating'"]),
        ('{"text": "a", "rating": "x"}\n', [], ["row 1", "number"]),
        ('{"text": "", "rating": 1}\n', [], ["row 1", "empty"]),
        ("", [], ["is empty"]),
        ('{"text": "a", "rating": 1}\n', ["--layers", "9"], ["--layers is 9", "1 … 4"]),
        ('{"text": "a", "rating": 1}\n', ["--heldout", "/nowhere"], ["/nowhere"]),
        ('{"text": "a", "rating": 1}\n', ["--model", "/nowhere"], ["/nowhere"]),
    ],
)
def test_wrong_input_is_one_sentence(tiny_model, tmp_path, capsys, content, changes, parts):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    arguments = ["--model", str(tiny_model("llama")), "--train", str(file), "--heldout", str(file),
                 "--to", str(tmp_path / "reward"), *changes]  # fmt: skip
    assert fit.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and not (tmp_path / "reward").exists()
    for part in parts:
        assert part in error, error


def test_ridge_minimises_the_weighted_penalised_squares():
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(30, 6, generator=generator), torch.randn(30, generator=generator).double()
    weight = torch.rand(30, generator=generator).double() + 0.1
    found = fit.ridge(x, y, weight, 2.0).requires_grad_(True)
    loss = (weight * (x.double() @ found - y).square()).sum() + 2.0 * found.square().sum()
    loss.backward()
    assert found.grad.abs().max() < 1e-9


def test_batches_hold_every_text_within_the_budget():
    lengths = random.Random(6).choices(range(1, 50), k=100)
    batches = fit._batches(lengths, 64)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert all(len(b) * max(lengths[i] for i in b) <= 64 or len(b) == 1 for b in batches)
