"""Write the quickstart's task: sums of two numbers from 1 to 99, shown after two solved examples.

    python -m launch.make_sums          # .cache/sums/train.jsonl and heldout.jsonl

One JSON object a line: {"prompt": "3+4=7\\n12+5=17\\n{a}+{b}=", "answer": "{a + b}"}.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from launch.fetch_smollm2 import default_cache

SHOTS = ((3, 4), (12, 5))
LARGEST = 99
HELD_OUT_SUMS = 256  # unordered pairs; nearly all of them appear in both orders


def sum_problems(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, held out) problems in random order, the same for the same `seed`.

    a + b and b + a always fall on the same side, so that a held-out answer can't be read off a
    training problem. The two sums that every prompt shows solved are in neither.
    """
    shown = {tuple(sorted(pair)) for pair in SHOTS}
    pairs = itertools.combinations_with_replacement(range(1, LARGEST + 1), 2)
    unordered = [pair for pair in pairs if pair not in shown]
    generator = random.Random(seed)
    generator.shuffle(unordered)
    sides = []
    for chosen in (unordered[HELD_OUT_SUMS:], unordered[:HELD_OUT_SUMS]):
        ordered = sorted({order for a, b in chosen for order in ((a, b), (b, a))})
        generator.shuffle(ordered)
        sides.append([_problem(a, b) for a, b in ordered])
    train, held_out = sides
    return train, held_out


def write_sums(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl` into `folder`; each is whole or as it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.jsonl", folder / "heldout.jsonl"
    for file, problems in zip(files, sum_problems(seed), strict=True):
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        partial.replace(file)
    return files


def _problem(a: int, b: int) -> dict[str, str]:
    solved = "".join(f"{x}+{y}={x + y}\n" for x, y in SHOTS)
    return {"prompt": f"{solved}{a}+{b}=", "answer": str(a + b)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's sums as JSONL.")
    parser.add_argument("--to", type=Path, default=default_cache() / "sums")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for file in write_sums(arguments.to, arguments.seed):
        print(file)


if __name__ == "__main__":
    main()
