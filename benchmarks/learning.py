"""Mean reward of every algorithm on a small task, drawn over each other.

    python benchmarks/learning.py --picture docs/learning.svg

The runs are those of tests/trainer/test_learning.py: a random Llama of 0.2 M parameters learns to
answer in small letters, on one rank of the CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from curves import draw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl import Config, Trainer  # noqa: E402
from tests.tiny_models import write_tiny_model  # noqa: E402
from tests.trainer.test_learning import ALGORITHMS, STEPS, settings  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    rewards: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("llama", Path(folder) / "model")
        for name in ALGORITHMS:
            run = Path(folder) / name
            run.mkdir()
            start = time.perf_counter()
            trainer = Trainer(Config.from_dict(settings(str(model), run, name)))
            rewards[name] = [trainer.step()["reward/mean"] for _ in range(STEPS)]
            trainer.close()
            seconds = time.perf_counter() - start
            every = " ".join(f"{r:.2f}" for r in rewards[name][:: STEPS // 8])
            print(f"| {name} | {every} | {rewards[name][-1]:.2f} | {seconds:.0f} s |", flush=True)
    if options.picture:
        draw(rewards, options.picture, x="training step", y="mean reward", smooth=1)


if __name__ == "__main__":
    main()
