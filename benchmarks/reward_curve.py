"""The reward of a run over its steps, as a picture.

    python benchmarks/reward_curve.py runs/sentiment --picture docs/sentiment.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from curves import draw, smoothed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--picture", type=Path, required=True, help="SVG to write")
    parser.add_argument("--smooth", type=int, default=4, help="steps of the running mean")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.run_dir / "metrics.jsonl").open()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    lines = {"each step": rewards, f"mean of {options.smooth}": smoothed(rewards, options.smooth)}
    draw(lines, options.picture, x="step", y="mean reward", smooth=1)


if __name__ == "__main__":
    main()
