"""Pure: what a file and overrides say is what the configuration holds, in both directions."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import Config, ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NUMBER = st.floats(min_value=1e-12, max_value=0.99, allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(text=TEXT, stop=st.lists(TEXT, max_size=3), number=NUMBER,
       kwargs=st.dictionaries(TEXT, PLAIN, max_size=3), with_help=st.booleans())  # fmt: skip
def test_written_configuration_loads_back_equal(
    tmp_path_factory, text, stop, number, kwargs, with_help
) -> None:
    config = Config.from_dict({
        "model": {"actor": {"path": text}},
        "data": {"train": text, "prompt_key": text},
        "rollout": {"stop": stop, "top_p": number},
        "reward": {"kwargs": kwargs},
        "training": {"actor": {"lr": number, "eps": number}},
    })  # fmt: skip
    path = tmp_path_factory.mktemp("round_trip") / "run.yaml"
    path.write_text(config.to_yaml(with_help=with_help), encoding="utf-8", newline="")
    assert Config.load(path) == config
    assert yaml.safe_load(config.to_yaml()) == config.to_dict(), "readable by YAML 1.1 tools too"


@pytest.mark.parametrize(
    ("text", "dotted", "expected"),
    [
        ("training.actor.lr=1e-5", "training.actor.lr", 1e-5),
        ("training.actor.lr='1e-5'", "training.actor.lr", 1e-5),
        ("training.actor.lr=.5", "training.actor.lr", 0.5),
        ("training.actor.lr=1", "training.actor.lr", 1.0),
        ("parallel.sp=false", "parallel.sp", False),
        ("rollout.n=010", "rollout.n", 10),
        ("seed=+7", "seed", 7),
        ("data.eval=no", "data.eval", "no"),
        ("data.eval=null", "data.eval", None),
        ("data.eval=~", "data.eval", None),
        ("data.eval=", "data.eval", None),
        ("data.eval='2024'", "data.eval", "2024"),
        ("data.eval=2024-01-02", "data.eval", "2024-01-02"),
        ("data.eval=12:30:45", "data.eval", "12:30:45"),
        ("data.eval=a=b", "data.eval", "a=b"),
        ('rollout.stop=["\\n"]', "rollout.stop", ["\n"]),
        ("rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids", [1, 2]),
        ("reward.kwargs.scale=1e3", "reward.kwargs", {"scale": 1000.0}),
        ("reward.kwargs={yes: on}", "reward.kwargs", {"yes": "on"}),
        ("hybrid_engine.share_embeddings=false", "hybrid_engine.share_embeddings", False),
    ],
)
def test_override_is_typed_by_yaml_1_2(load, text, dotted, expected) -> None:
    value = load(text).value(dotted)
    assert value == expected
    assert type(value) is type(expected)


def test_overrides_merge_into_sections_and_the_last_one_wins(load) -> None:
    config = load("rollout={n: 2, top_k: 5}", "rollout.n=3", "rollout.n=4", "model.actor.path=b")
    assert (config.rollout.n, config.rollout.top_k) == (4, 5)
    assert config.model.actor.path == "b"
    again = config.with_overrides(["rollout.top_k=6"])
    assert (again.rollout.n, again.rollout.top_k, config.rollout.top_k) == (4, 6, 5)


@pytest.mark.parametrize("text", ["seed", "=3", "rollout..n=3", ".seed=3", "rollout.=3"])
def test_malformed_override_shows_the_form(load, text) -> None:
    with pytest.raises(ConfigError, match="expected section.key=value; write it like"):
        load(text)


def test_override_that_is_not_yaml_is_named(load) -> None:
    with pytest.raises(ConfigError, match=r"override 'rollout\.stop=\[a'.*not valid YAML"):
        load("rollout.stop=[a")


def test_a_section_keeps_the_defaults_that_its_parent_gives(minimal) -> None:
    minimal.write_text(minimal.read_text() + "training: {critic: {beta1: 0.8}}\n")
    config = Config.load(minimal)
    assert config.training.critic.beta1 == 0.8
    assert config.training.critic.lr == 1e-5 != config.training.actor.lr


BAD_FILES = {
    "a: 1\na: 2\n": r"line 2: a is already set in line 1",
    "rollout:\n  n: 1\n  top_k: 2\n  n: 3\n": r"line 4: rollout\.n is already set in line 2",
    "rollout: {n: 1, n: 2}\n": r"rollout\.n is already set",
    "rollout:\n\tn: 1\n": r"line 2: tab in the indentation; use spaces",
    "rollout:\n  \tn: 1\n": r"line 2: tab in the indentation; use spaces",
    "rollout: {n: 1\n": r"line 2: not valid YAML",
    "a: &x {b: 1}\nc:\n  <<: *x\n": r"line 3: merge keys",
    "a: &x [*x]\n": r"alias contains itself",
    "a: !!python/object:os.system x\n": r"line 1: tag .* is not supported",
    "a: !!float 1\n": r"tag .* is not supported",
    "? [a, b]\n: 1\n": r"a key must be plain text",
    "a: 1\n---\nb: 2\n": r"not valid YAML",
    "- a\n- b\n": r"expected `section:` lines",
    "just text\n": r"expected `section:` lines",
    "": r"is empty",
    "# only a comment\n": r"is empty",
    "a: \x01\n": r"not valid YAML",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_bad_file_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        Config.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: can't read .*No such file"):
        Config.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="can't read .*directory"):
        Config.load(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: ü\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        Config.load(latin)


def test_configuration_survives_pickling_and_so_does_its_error(load) -> None:
    config = load("rollout.n=2")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError) as refusal:
        load("rollout.n=0")
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copy), copy.setting) == (str(refusal.value), "rollout.n")


def test_import_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_rl.config as c; print({'torch', 'megatron'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
