"""How far generation's log-probs are from training's, with the same weights.

    python benchmarks/logprob_drift.py MODEL_FOLDER [--prompts 8] [--new-tokens 32]

Samples responses with the generation engine (prefill, then one token at a time over the paged
cache), evaluates the same tokens with the packed pass that training uses, and prints the mean and
largest |Δ log-prob|. Both are also compared with the packed pass of an fp32 model on these tokens,
which tells rounding of the number format from a difference between the two paths. Uses a GPU where
there is one.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from megatron_rl import Config, create_inference_engine
from megatron_rl.engine.passes import logprob_pass
from megatron_rl.generation.sequence import SamplingParams
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.rollout.batch import RolloutBatch, make_batch
from megatron_rl.rollout.prompts import Prompt

TOPICS = ("the sea", "a long winter", "prime numbers", "old trains", "bread", "the moon",
          "a lost key", "the first day of school")  # fmt: skip


def sample(model_folder: str, dtype: str, count: int, new_tokens: int):
    """The model in `dtype` and a batch that it generated."""
    engine = create_inference_engine(model_folder, dtype=dtype)
    prompts = [f"Story {i}. Write about {TOPICS[i % len(TOPICS)]}:" for i in range(count)]
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0)
    responses = engine.generate(prompts, sampling)
    rows = [
        Prompt(index=i, text=text, token_ids=responses[i].prompt_ids, record={})
        for i, text in enumerate(prompts)
    ]
    batch = make_batch(rows, responses, [""] * count, list(range(count)), 1)
    return engine.engine.model, batch


def packed_logprobs(model: ParallelModel, batch: RolloutBatch, folder: str, dtype: str):
    config = Config.from_dict({
        "model": {"actor": {"path": folder}}, "data": {"train": "unused"},
        "training": {"dtype": dtype, "micro_batch_size": 4},
        "rollout": {"batch_size": len(batch)},
    })  # fmt: skip
    return logprob_pass(batch, model, config)


def difference(a_BR: Tensor, b_BR: Tensor, mask_BR: Tensor) -> tuple[float, float]:
    """Mean and largest |a − b| over real tokens."""
    size = (a_BR - b_BR).abs()[mask_BR.bool()]
    return size.mean().item(), size.max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.model} on {device}, {options.prompts} × ≤ {options.new_tokens} tokens")
    print("| dtype | generation − training | generation − fp32 | training − fp32 | (mean, max)")
    for dtype in options.dtypes:
        model, batch = sample(options.model, dtype, options.prompts, options.new_tokens)
        training_BR = packed_logprobs(model, batch, options.model, dtype)
        exact = create_inference_engine(options.model, dtype="fp32").engine.model
        exact_BR = packed_logprobs(exact, batch, options.model, "fp32")
        generated_BR = batch.rollout_logprobs_BR
        cells = [
            "{:.1e}, {:.1e}".format(*difference(a, b, batch.mask_BR))
            for a, b in ((generated_BR, training_BR), (generated_BR, exact_BR),
                         (training_BR, exact_BR))
        ]  # fmt: skip
        print(f"| {dtype} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
