"""Layer: gloo ranks. What is exported loads in transformers and writes the same greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.convert.test_round_trip import convert
from tests.tiny_models import TINY

PROMPTS = ["The cat", "1 + 2 =", "A long time ago, in a small town by the sea,"]
NEW = 32
FAST = ("llama31", "qwen3")


def transformers_text(folder: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens per prompt and the logits they were taken from; loading must be strict."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, logits = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(
            ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens.append(out.sequences[0, ids.shape[1] :].tolist())
        logits.append(torch.cat(out.logits))
    return tokens, logits


def our_text(rank, world, folder, export):
    """Greedy tokens of our engine at the world's tensor parallel size; exports what it loaded."""
    from megatron_rl import create_inference_engine
    from megatron_rl.convert.huggingface import export_huggingface
    from megatron_rl.convert.kinds import open_model
    from megatron_rl.generation.sequence import SamplingParams

    engine = create_inference_engine(folder, tensor_parallel_size=world)
    companions = open_model(folder, "actor").companions()
    model = engine.engine.model
    export_huggingface(model, export, companions=companions, dtype="fp32", max_shard_bytes=200_000)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    return [response.token_ids for response in engine.generate(PROMPTS, sampling)]


def assert_same_text(ours: list[list[int]], theirs: list[list[int]], logits) -> None:
    """A difference is allowed only where the reference's two best logits are within 1e-4."""
    for mine, want, logits_NV in zip(ours, theirs, logits, strict=True):
        first = next((i for i in range(NEW) if mine[i] != want[i]), None)
        if first is not None:
            best = logits_NV[first].topk(2).values
            assert best[0] - best[1] < 1e-4, f"token {first}: {mine[first]} != {want[first]}"


def check(ranks, source: Path, folder: Path) -> None:
    convert("hf-to-megatron", source, folder / "m")
    convert("megatron-to-hf", folder / "m", folder / "back", "--max-shard-size", "300KB")
    theirs, logits = transformers_text(source)
    assert transformers_text(folder / "back")[0] == theirs
    ours, _ = ranks(2, our_text, str(folder / "m"), str(folder / "export"))
    assert_same_text(ours, theirs, logits)
    assert transformers_text(folder / "export")[0] == theirs


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in sorted(TINY)]
)
def test_greedy_text_of_tiny_models(ranks, tiny_model, tmp_path, name):
    check(ranks, tiny_model(name), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_greedy_text_of_smollm2(ranks, smollm2_path, tmp_path):
    check(ranks, smollm2_path, tmp_path)
