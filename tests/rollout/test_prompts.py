"""Layer: pure. Prompts: order, exact resume, a changed file is noticed, chat templates."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.rollout.collect import replica_share
from megatron_rl.rollout.prompts import PromptFile, PromptStream
from megatron_rl.text import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return TextTokenizer(tiny_model_dir)


def prompt_file(folder, tokenizer, count=7, name="prompts.jsonl", **changes):
    path = folder / name
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    options = dict(
        setting="data.train", prompt_key="prompt", chat_template=False, tokenizer=tokenizer,
        limit=50,
    )  # fmt: skip
    return PromptFile(str(path), **{**options, **changes})


def test_every_prompt_once_per_epoch_in_a_new_order(tmp_path, tokenizer):
    stream = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=True, seed=3)
    first, second = stream.take(7), stream.take(7)
    assert sorted(p.index for p in first) == sorted(p.index for p in second) == list(range(7))
    assert [p.index for p in first] != [p.index for p in second]
    assert all(p.record["answer"] == p.index and p.text == f"question {p.index}" for p in first)
    assert tokenizer.decode(first[0].token_ids) == first[0].text
    in_order = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=False, seed=3)
    assert [p.index for p in in_order.take(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("taken", [0, 3, 7, 16])
def test_resumed_stream_continues_exactly(tmp_path, tokenizer, taken):
    whole = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=True, seed=1)
    whole.take(taken)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert [p.index for p in resumed.take(12)] == [p.index for p in whole.take(12)]


def test_changed_data_is_noticed(tmp_path, tokenizer):
    state = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=True, seed=1).state_dict()
    changed = PromptStream(prompt_file(tmp_path, tokenizer, count=8), shuffle=True, seed=1)
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        changed.load_state_dict(state)
    other_seed = PromptStream(prompt_file(tmp_path, tokenizer), shuffle=True, seed=2)
    with pytest.raises(ConfigError, match="seed was 1, is 2"):
        other_seed.load_state_dict(state)


def test_chat_template_wraps_text_and_conversations(tmp_path, smollm2_path):
    tokenizer = TextTokenizer(smollm2_path)
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi"}]
    path.write_text(json.dumps({"q": "Hi"}) + "\n" + json.dumps({"q": turns}) + "\n")
    file = PromptFile(
        str(path), setting="data.train", prompt_key="q", chat_template=True, tokenizer=tokenizer,
        limit=100,
    )  # fmt: skip
    assert file[0].token_ids == file[1].token_ids
    assert "assistant" in tokenizer.decode(file[0].token_ids)
    assert file[0].token_ids != tokenizer.encode("Hi")
    with pytest.raises(ConfigError, match="prompt 1 has"):
        PromptFile(str(path), setting="data.train", prompt_key="q", chat_template=True,
                   tokenizer=tokenizer, limit=10)  # fmt: skip


class _Layout:
    def __init__(self, dp):
        self.dp = dp


class _Groups:
    def __init__(self, dp, rank):
        self.layout, self.dp_rank = _Layout(dp), rank


@pytest.mark.parametrize("count, block, dp", [(12, 4, 2), (12, None, 3), (10, 4, 4), (2, 2, 4)])
def test_replicas_share_every_block(count, block, dp):
    shares = [replica_share(count, _Groups(dp, r), block) for r in range(dp)]
    assert sorted(sum(shares, [])) == list(range(count))
    for start in range(0, count, block or count):
        stop = min(start + (block or count), count)
        sizes = [sum(start <= i < stop for i in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
