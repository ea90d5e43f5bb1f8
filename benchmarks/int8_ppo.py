"""PPO of a small model with fp32 and with int8 gradient reduction, drawn over each other.

    python benchmarks/int8_ppo.py --picture docs/int8_ppo.svg [--steps 60] [--seeds 3]

The task is that of tests/trainer/test_learning.py, on two data parallel ranks: a random Llama of
0.2 M parameters learns to answer in small letters. From each seed only
`training.gradient_compression` differs between the runs. Prints the mean reward and value loss of
the last third of the steps, and draws the mean reward over the seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from curves import draw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl import Config, Trainer  # noqa: E402
from tests.tiny_models import write_tiny_model  # noqa: E402
from tests.trainer.test_learning import settings  # noqa: E402

RUNS = {"fp32": None, "int8": {}, "int8, error feedback": {"error_feedback": True}}
TAGS = ("reward/mean", "value/loss", "policy/grad_norm")


def run(file: Path) -> None:
    """The steps of a settings file on this rank; rank 0 leaves the curves."""
    values = json.loads(file.read_text())
    trainer = Trainer(Config.from_dict(values))
    try:
        steps = [trainer.step() for _ in range(values["training"]["steps"])]
        if trainer.groups.layout.dp == 2 and trainer.groups.dp_rank == 0:
            curves = {tag: [s[tag] for s in steps] for tag in TAGS}
            file.with_suffix(".curves").write_text(json.dumps(curves))
    finally:
        trainer.close()


def curves_of(folder: Path, model: Path, compression: dict | None, options, seed: int) -> dict:
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    values = settings(str(model), run_folder, "ppo")
    values["seed"] = seed
    values["training"]["steps"] = options.steps
    if compression is not None:
        values["training"]["gradient_compression"] = {
            "enable": True, "min_bucket_elements": 0, **compression,
        }  # fmt: skip
    file = run_folder / "settings.json"
    file.write_text(json.dumps(values))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node", "2", __file__, "--settings", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.with_suffix(".curves").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--settings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.settings:
        return run(options.settings)
    rewards: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("llama", Path(folder) / "model")
        for name, compression in RUNS.items():
            runs = [
                curves_of(Path(folder), model, compression, options, seed)
                for seed in range(1, options.seeds + 1)
            ]
            tail = options.steps // 3
            for tag in runs[0]:
                means = [sum(r[tag][-tail:]) / tail for r in runs]
                print(f"| {name} | {tag} | {' '.join(f'{m:.4f}' for m in means)} |", flush=True)
            columns = zip(*(r["reward/mean"] for r in runs), strict=True)
            rewards[name] = [sum(column) / len(column) for column in columns]
    if options.picture:
        draw(rewards, options.picture, x="PPO step", y="mean reward", smooth=3)


if __name__ == "__main__":
    main()
