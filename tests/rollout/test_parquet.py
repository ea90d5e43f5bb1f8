"""Layer: pure, and one run on gloo ranks. A Parquet file gives what its rows as JSONL give."""

from __future__ import annotations

import json
import pathlib
import random
import sys

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config import ConfigError
from megatron_rl.rollout.prompts import PromptFile, PromptStream
from megatron_rl.rollout.records import ParquetRows, open_records
from megatron_rl.text import TextTokenizer
from tests.trainer import run_case


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return TextTokenizer(tiny_model_dir)


def random_rows(count: int, seed: int) -> list[dict]:
    """Texts with several bytes a letter, numbers, lists, nested objects and nulls."""
    rng = random.Random(seed)
    return [
        {
            "prompt": f"{i}: " + "".join(rng.choices("abc äß漢", k=rng.randint(1, 30))),
            "answer": rng.choice([None, rng.randint(-9, 9)]), "score": rng.random(),
            "tags": rng.choices(["x", "y"], k=rng.randint(0, 3)),
            "extra": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]  # fmt: skip


def write_parquet(path, rows, *, group=5, **options):
    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    pyarrow.parquet.write_table(table, path, row_group_size=group, **options)
    return path


def open_prompts(path, tokenizer, **changes):
    options = dict(
        setting="data.train", prompt_key="prompt", chat_template=False, tokenizer=tokenizer,
        limit=200,
    )  # fmt: skip
    return PromptFile(path, **{**options, **changes})


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_the_same_prompts_as_from_lines(tmp_path, tokenizer, compression):
    """In any order, over several epochs, whatever the row groups: same text, ids and records."""
    rows = random_rows(23, seed=len(compression))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = write_parquet(
        tmp_path / "rows.parquet", rows, compression=compression, data_page_size=64
    )
    streams = [
        PromptStream(open_prompts(path, tokenizer), shuffle=True, seed=4) for path in (lines, table)
    ]
    for count in (1, 7, 30, 23):
        want, got = (stream.take(count) for stream in streams)
        assert got == want
    assert got[3].record == rows[got[3].index]


def test_resumes_exactly_and_notices_other_data(tmp_path, tokenizer):
    rows = random_rows(17, seed=1)
    path = write_parquet(tmp_path / "rows.parquet", rows)
    whole = PromptStream(open_prompts(path, tokenizer), shuffle=True, seed=2)
    whole.take(20)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptStream(open_prompts(path, tokenizer), shuffle=True, seed=2)
    resumed.load_state_dict(state)
    assert resumed.take(19) == whole.take(19)
    rows[9]["answer"] = 99
    write_parquet(path, rows)
    changed = PromptStream(open_prompts(path, tokenizer), shuffle=True, seed=2)
    with pytest.raises(ConfigError, match="data.train: the prompts changed since the checkpoint"):
        changed.load_state_dict(state)


def test_one_row_group_is_read_at_a_time_and_once(tmp_path, monkeypatch):
    """Reading many rows decodes every row group among them once, and no other."""
    records = ParquetRows(write_parquet(tmp_path / "rows.parquet", random_rows(40, 3), group=8))
    assert len(records) == 40
    read, groups = records._file.read_row_group, []

    class Watched:
        def read_row_group(self, group, **options):
            groups.append(group)
            return read(group, **options)

    monkeypatch.setattr(records, "_file", Watched())
    wanted = [39, 8, 0, 15, 33, 8]
    assert [r["extra"]["index"] for r in records.read(wanted)] == wanted
    assert sorted(groups) == [0, 1, 4]


def test_empty_row_groups_hold_no_row(tmp_path):
    rows = random_rows(6, 5)
    table = pyarrow.Table.from_pylist(rows)
    path = tmp_path / "rows.parquet"
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for part in (table[:0], table[:2], table[:0], table[2:], table[:0]):
            writer.write_table(part)
    records = open_records(path)
    assert list(records.scan()) == rows == records.read(range(6))


def test_conversations_and_a_name_without_suffix(tmp_path, smollm2_path):
    tokenizer = TextTokenizer(smollm2_path)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_parquet(tmp_path / "chats", [{"q": turns}])
    (prompt,) = open_prompts(path, tokenizer, prompt_key="q", chat_template=True).read([0])
    assert prompt.token_ids == tokenizer.encode_chat(turns) and prompt.record == {"q": turns}
    with pytest.raises(ConfigError, match="'q' is a list of messages; .*chat_template=true"):
        open_prompts(path, tokenizer, prompt_key="q")


def damaged(folder):
    """A file whose footer is whole and whose pages are not."""
    path = write_parquet(folder / "x.parquet", random_rows(40, 6), compression="none", group=8)
    content = bytearray(path.read_bytes())
    page = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0)
    start = page.dictionary_page_offset or page.data_page_offset
    content[start : start + page.total_compressed_size] = b"\xff" * page.total_compressed_size
    path.write_bytes(content)
    return path


def cut_short(folder):
    path = write_parquet(folder / "x.parquet", random_rows(9, 7))
    path.write_bytes(path.read_bytes()[:-40])
    return path


def of_columns(**columns):
    return lambda folder: write_parquet(folder / "x.parquet", pyarrow.table(columns))


def test_several_files_are_read_as_one(tmp_path, tokenizer):
    """A folder or a pattern, of either kind: the same rows, whatever the cuts."""
    rows = random_rows(30, 9)
    one = tmp_path / "one.jsonl"
    one.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "pieces"
    folder.mkdir()
    for number, (start, stop) in enumerate([(0, 7), (7, 8), (8, 22)]):
        write_parquet(folder / f"train-{number:05}-of-00003.parquet", rows[start:stop])
    lines = "".join(json.dumps(row) + "\n" for row in rows[22:])
    (folder / "trains.jsonl").write_text(lines)
    want = open_prompts(one, tokenizer)
    found = open_prompts(folder, tokenizer)
    order = random.Random(1).sample(range(30), 30)
    assert found.read(order) == want.read(order) and len(found) == 30
    pieces = open_prompts(folder / "train-*.parquet", tokenizer)
    assert pieces.read([21, 0, 7]) == want.read([21, 0, 7]) and len(pieces) == 22
    before = found.fingerprint
    (folder / "trains.jsonl").write_text(lines.replace("split", "part"))
    assert open_prompts(folder, tokenizer).fingerprint != before


def without_a_piece(folder):
    for number in (0, 2):
        write_parquet(folder / f"train-{number:05}-of-00003.parquet", random_rows(2, number))
    return folder / "train-*.parquet"


def one_piece(folder):
    write_parquet(folder / "train-00000-of-00002.parquet", random_rows(2, 1))
    return folder


def test_a_piece_that_is_named_may_be_used_alone(tmp_path, tokenizer):
    one_piece(tmp_path)
    assert len(open_prompts(tmp_path / "train-00000-of-00002.parquet", tokenizer)) == 2


BAD = {
    "no_such_files": (lambda f: f / "train-*.parquet", ["no file is like", "check the path"]),
    "empty_folder": (lambda f: f, ["has no *.jsonl and no *.parquet"]),
    "one_piece_of_two": (one_piece, ["1 of the 2 pieces train-…-of-00002", "fetch the others"]),
    "missing_piece": (without_a_piece, ["2 of the 3 pieces train-…-of-00003", "fetch the others"]),
    "no_file": (lambda f: f / "none.parquet", ["there is no file", "check the path"]),
    "cut_short": (cut_short, ["can't be read as Parquet", "JSONL"]),
    "damaged": (damaged, ["rows 1 to 40 can't be read", "write the file again"]),
    "another_kind": (
        lambda f: (f / "x.parquet").write_text('{"prompt": "a"}\n') and f / "x.parquet",
        ["can't be read as Parquet"],
    ),
    "no_rows": (of_columns(prompt=pyarrow.array([], pyarrow.string())), ["has no prompts"]),
    "no_column": (
        of_columns(question=["a"], answer=[1]),
        ["prompt 1 has no 'prompt' (its keys: 'question', 'answer')", "data.prompt_key"],
    ),
    "a_null": (of_columns(prompt=["a", "b", None]), ["prompt 3 has an empty 'prompt'"]),
    "numbers": (of_columns(prompt=[1, 2]), ["prompt 1: 'prompt' is of type int", "a text"]),
    "bytes": (of_columns(prompt=[b"a"]), ["prompt 1: 'prompt' is of type bytes", "a text"]),
    "too_long": (of_columns(prompt=["a", "b" * 201]), ["prompt 2 has 201 tokens", "1 … 200"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_sentence(tmp_path, tokenizer, case):
    write, parts = BAD[case]
    with pytest.raises(ConfigError) as refusal:
        open_prompts(write(tmp_path), tokenizer)
    message = str(refusal.value)
    assert message.startswith("data.train: ") and "\n" not in message, message
    for part in parts:
        assert part in message, message


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, tokenizer, monkeypatch):
    path = write_parquet(tmp_path / "rows.parquet", random_rows(3, 8))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="not installed .*; pip install pyarrow"):
        open_prompts(path, tokenizer)
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    assert len(open_prompts(lines, tokenizer)) == 1, "JSONL needs nothing more"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_is_the_same_with_either_kind_of_file(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(str(tiny_model_dir), tmp_path / "lines")
    want = ranks(2, run_case.run, values, 2)
    path = tmp_path / "prompts.parquet"
    lines = pathlib.Path(values["data"]["train"]).read_text().splitlines()
    write_parquet(path, [json.loads(line) for line in lines])
    values = run_case.settings(
        str(tiny_model_dir), tmp_path / "rows", data={"train": str(path), "eval": str(path)}
    )
    for got, expected in zip(ranks(2, run_case.run, values, 2), want, strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            assert mine["policy/loss"] == theirs["policy/loss"]
            assert mine["reward/mean"] == theirs["reward/mean"]
