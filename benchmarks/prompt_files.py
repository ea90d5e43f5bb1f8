"""CPU time of prompts from JSONL and Parquet: the check at the start, and one shuffled step.

    python benchmarks/prompt_files.py --rows 50000 --take 256

Writes a synthetic data set (texts of 200 to 800 characters and a few other columns) as JSONL and as
Parquet with row groups of several sizes, and reads each. Tokenising is left out: it is the same for
both. Times are CPU seconds of this process, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatron_rl.rollout.records import open_records


def rows_of(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
    return [
        {
            "prompt": " ".join(rng.choices(words, k=rng.randint(30, 120))), "answer": str(i),
            "level": rng.randint(1, 5), "extra": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]  # fmt: skip


def measure(path: Path, take: int, repeats: int) -> tuple[float, list[float]]:
    """CPU seconds of the scan, and of each of `repeats` steps that read `take` rows."""
    start = time.process_time()
    records = open_records(path)
    for _ in records.scan():
        pass
    scan, steps, rng = time.process_time() - start, [], random.Random(0)
    for _ in range(repeats):
        chosen = rng.sample(range(len(records)), take)
        start = time.process_time()
        records.read(chosen)
        steps.append(time.process_time() - start)
    return scan, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--take", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    options = parser.parse_args()
    rows = rows_of(options.rows, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        files = {"jsonl": Path(folder) / "rows.jsonl"}
        files["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = pyarrow.Table.from_pylist(rows)
        for size in options.groups:
            path = files[f"parquet, groups of {size}"] = Path(folder) / f"{size}.parquet"
            pyarrow.parquet.write_table(table, path, row_group_size=size)
        del rows, table
        for name, path in files.items():
            scan, steps = measure(path, options.take, options.repeats)
            print(
                f"{name:26} {path.stat().st_size / 1e6:6.1f} MB   check {scan:6.2f} s   "
                f"{options.take} rows {1e3 * statistics.median(steps):7.1f} ms "
                f"({1e3 * min(steps):.1f} to {1e3 * max(steps):.1f})"
            )


if __name__ == "__main__":
    main()
