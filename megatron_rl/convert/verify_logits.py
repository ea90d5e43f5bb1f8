"""What two folders compute on real text: transformers on the one, this project on the other.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.convert.huggingface import HuggingFaceFolder
from megatron_rl.convert.load import load_weights
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.convert.verify import Row

TEXT = (
    "The river had risen in the night, and by morning the lower meadow was a lake. Anna counted "
    "the sheep on the hill: forty-one, which was right, and the old dog besides. \"We can't move "
    "them before the water falls,\" she said, \"so we'll need 3 bales a day, perhaps 4.\" Her "
    "brother wrote it down: days = 6; bales = days * 3.5. In the town below, the bridge was closed."
)
_TOLERANCE = 1e-3
_MARGIN_BYTES = 2 * 10**9


def compare_logits(source: ModelFolder, result: ModelFolder, text: str = TEXT) -> Row:
    """One row: the largest difference of logits (or of the score), both computed in fp32."""
    reference = next((f for f in (source, result) if isinstance(f, HuggingFaceFolder)), None)
    if reference is None:
        return _not_run("neither folder is a Hugging Face one, which transformers could load")
    ours = result if reference is source else source
    if reference.fresh_head or ours.fresh_head:
        return _not_run("a fresh value head has nothing to compare")
    if reference.head == "value" and reference.weights.stored_name("score.weight")[:6] != "score.":
        return _not_run("transformers does not know this name of a value head")
    parameters = sum(_numel(info.shape) for info in reference.tensors().values())
    needed, free = 4 * parameters + _MARGIN_BYTES, psutil.virtual_memory().available
    if needed > free:
        return _not_run(f"needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free")
    ids_T = _tokens(reference, text)
    expected_TV = _transformers_logits(reference, ids_T)  # one model in memory at a time
    found_TV = _our_logits(ours, ids_T)
    if reference.head == "value":
        expected_TV, found_TV = expected_TV.view(-1), found_TV[-1:]
    gap = (expected_TV - found_TV).abs().max().item()
    scale = max(1.0, expected_TV.abs().max().item())
    detail = f"{len(ids_T)} tokens, largest difference {gap:.2g} of {scale:.3g}"
    if reference.head == "lm":
        same = (expected_TV.argmax(-1) == found_TV.argmax(-1)).float().mean()
        detail += f", same best token at {same:.1%}"
    outcome = "equal" if gap <= _TOLERANCE * scale else "differs"
    return Row(name="logits of transformers", outcome=outcome, detail=detail)


def _not_run(reason: str) -> Row:
    return Row(name="logits of transformers", outcome="not run", detail=reason)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _tokens(folder: ModelFolder, text: str) -> Tensor:
    """Ids of the text; without a tokenizer, of its bytes."""
    from megatron_rl.text import TextTokenizer

    limit = min(512, folder.architecture.max_positions)
    try:
        ids = TextTokenizer(folder.companion_folder).encode(text)
    except ConfigError:
        ids = [b % folder.architecture.vocab for b in text.encode()]
    return torch.tensor(ids[:limit])


def _transformers_logits(folder: HuggingFaceFolder, ids_T: Tensor) -> Tensor:
    import transformers

    auto = (
        transformers.AutoModelForCausalLM
        if folder.head == "lm"
        else transformers.AutoModelForSequenceClassification
    )
    path: Path = folder.path
    model = auto.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return model(ids_T[None]).logits[0]


def _our_logits(folder: ModelFolder, ids_T: Tensor) -> Tensor:
    """Logits `[T, V]`, or values `[T]`, of one rank on the CPU."""
    from megatron_rl import cuda_on_cpu
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_only
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, forget_groups, seed_model_parallel

    cuda_on_cpu.enable()
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = ParallelGroups(layout=Layout(world_size=1))
        seed_model_parallel(0, groups)
        model = build_model(folder.role, folder.architecture, groups, backend="local")
        load_weights(model, folder)
        batch = pack([ids_T], [0], model=model)
        (logits,) = forward_only(model, [batch], lambda out, _: out)
        return logits[: len(ids_T)].float()
    finally:
        if alone:
            forget_groups()
            dist.destroy_process_group()
