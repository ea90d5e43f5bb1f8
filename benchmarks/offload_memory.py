"""Peak device memory and seconds of PPO steps with four models, with and without offloading.

    python benchmarks/offload_memory.py --tokenizer MODEL_FOLDER [--shape 1b|tiny] [--steps 4]

Writes a random Llama of the shape and a reward model of the same trunk with transformers, runs the
same steps twice in fresh processes, and prints each phase's memory and seconds: the last step's, so
that compilation is over.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from megatron_rl import Config, Trainer

SHAPES = {
    "1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, head_dim=64, intermediate_size=8192, vocab_size=128256),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, intermediate_size=128, vocab_size=50000),
}  # fmt: skip
ROLES = ("actor", "critic", "reference", "reward", "optimizer")


def write_models(folder: Path, shape: str, tokenizer: str) -> None:
    config = transformers.LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096, num_labels=1
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    kinds = {
        "actor": transformers.LlamaForCausalLM,
        "reward": transformers.LlamaForSequenceClassification,
    }
    for name, kind in kinds.items():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = kind(config).to(dtype)
        model.save_pretrained(folder / name)
        del model
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(tokenizer) / file, folder / name / file)


def settings(folder: Path, name: str, options: argparse.Namespace) -> dict:
    gpu = torch.cuda.is_available()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Number {i}"}) + "\n" for i in range(512)))
    # The actor itself generates first and trains last: its optimizer is what can go.
    offload = {f"{role}_offload": {"enable": True, "offload_device": "cpu"} for role in ROLES[1:]}
    return {
        "run_dir": str(folder / name), "data": {"train": str(prompts)},
        "model": {r: {"path": str(folder / r)} for r in ("actor", "reward")},
        "rollout": {
            "batch_size": options.batch, "n": 1, "max_new_tokens": options.new, "kv_cache_gb": 2,
        },
        "algorithm": {"name": "ppo", "kl": {"placement": "reward", "coef": 0.05}},
        "training": {
            "steps": options.steps, "mini_batch_size": options.batch, "micro_batch_size": 4,
            "dtype": "bf16" if gpu else "fp32",
        },
        "hybrid_engine": offload if name == "offloaded" else {},
        "monitor": {"console": False, "preflight": "off"},
        "checkpoint": {"resume": "never"},
        "runtime": {"device": "cuda" if gpu else "cpu"},
    }  # fmt: skip


def last_metrics(folder: Path, name: str, options: argparse.Namespace) -> dict[str, float]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings(folder, name, options)))
    subprocess.run([sys.executable, __file__, "--run", str(file)], check=True)
    return json.loads(file.with_suffix(".metrics").read_text())


def run(file: Path) -> None:
    """The steps of a settings file, without checkpoints; leaves the last one's metrics."""
    values = json.loads(file.read_text())
    trainer = Trainer(Config.from_dict(values))
    try:
        for _ in range(values["training"]["steps"]):
            metrics = trainer.step()
    finally:
        trainer.close()
    file.with_suffix(".metrics").write_text(json.dumps(metrics))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", help="a model folder with tokenizer.json")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args()
    if options.run:
        return run(options.run)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, options.shape, options.tokenizer)
        plain, offloaded = (last_metrics(folder, n, options) for n in ("plain", "offloaded"))
    print("| metric | all on the device | offloaded |\n|---|---|---|")
    for key in sorted(plain):
        if key.startswith(("memory/", "perf/")) and key in offloaded:
            print(f"| {key} | {plain[key]:.3f} | {offloaded[key]:.3f} |")


if __name__ == "__main__":
    main()
