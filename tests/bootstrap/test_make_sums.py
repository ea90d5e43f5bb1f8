"""The quickstart's task (pure): right answers, disjoint sides, seeded, whole files."""

import json
import re

import pytest

from launch.make_sums import SHOTS, sum_problems, write_sums

PROMPT = re.compile(r"3\+4=7\n12\+5=17\n(\d+)\+(\d+)=")


def pairs(problems):
    found = []
    for problem in problems:
        assert set(problem) == {"prompt", "answer"}
        a, b = map(int, PROMPT.fullmatch(problem["prompt"]).groups())
        assert problem["answer"] == str(a + b)
        found.append((a, b))
    return found


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_sides_are_disjoint_and_cover_every_sum(seed):
    train, held_out = map(pairs, sum_problems(seed))
    assert len(held_out) >= 256
    # Not even the swapped sum may be in training.
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    shown = {order for a, b in SHOTS for order in ((a, b), (b, a))}
    every = {(a, b) for a in range(1, 100) for b in range(1, 100)} - shown
    assert sorted(train + held_out) == sorted(every)


def test_order_is_random_and_follows_the_seed():
    train, held_out = sum_problems(7)
    assert (train, held_out) == sum_problems(7)
    assert held_out != sum_problems(8)[1]
    assert pairs(train) != sorted(pairs(train)) and pairs(held_out) != sorted(pairs(held_out))


def test_files_hold_one_problem_a_line_and_are_replaced_whole(tmp_path):
    folder = tmp_path / "new" / "sums"
    write_sums(folder)
    (folder / "train.jsonl").write_text('{"prompt": "cut sh')
    files = write_sums(folder)
    assert [file.name for file in files] == ["train.jsonl", "heldout.jsonl"]
    read = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert read == list(sum_problems())
    assert sorted(folder.iterdir()) == sorted(files)
