"""Checkpoints written and read by Megatron-Core itself: no code of this project is in between.

Runs on gloo ranks of their own (Megatron's global groups have the layout under test).
"""

from __future__ import annotations

import argparse
import io
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

ITERATION = 7
SHAPE = dict(
    num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    kv_channels=16, layernorm_epsilon=1e-5, add_qkv_bias=False, qk_layernorm=False,
)  # fmt: skip
# Model settings; those that are not of TransformerConfig are listed in `_split`.
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(vocab_size=259, rotary_base=20000, untie=True),
    "llama31": dict(vocab_size=256, rotary_base=500000, untie=True, use_rope_scaling=True,
                    rope_scaling_factor=4.0),
    "qwen2": dict(vocab_size=259, rotary_base=10000, untie=False, add_qkv_bias=True),
    "qwen3": dict(vocab_size=259, rotary_base=10000, untie=True, qk_layernorm=True,
                  num_query_groups=4),
}  # fmt: skip
PADDED = 384  # Megatron-LM's padding at TP 2 would be 512; any multiple is read


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(5))


def build(name: str, *, tp: int, pp: int, vpp: int = 1) -> list[torch.nn.Module]:
    """This rank's chunks of a Megatron-Core GPT model, by Megatron's own global groups."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, vpp if vpp > 1 else None, create_gloo_process_groups=False
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(100 + stage)
    settings = MODELS[name]
    own = {k: v for k, v in settings.items() if k in SHAPE}
    config = TransformerConfig(
        **SHAPE | own, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.float32, pipeline_dtype=torch.float32, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        use_cpu_initialization=True, init_method_std=0.3,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    chunks = []
    for index in range(vpp):
        chunk = GPTModel(
            config, spec, PADDED, 64, position_embedding_type="rope",
            pre_process=stage == 0 and index == 0,
            post_process=stage == pp - 1 and index == vpp - 1,
            share_embeddings_and_output_weights=not settings["untie"],
            rotary_base=settings["rotary_base"], rope_scaling="use_rope_scaling" in settings,
            rope_scaling_factor=settings.get("rope_scaling_factor", 8.0),
            vp_stage=index if vpp > 1 else None,
        )  # fmt: skip
        chunks.append(chunk.eval())
        _randomise_norms(chunk)
    return chunks


def _randomise_norms(chunk: torch.nn.Module) -> None:
    """Norms and biases start at one and zero: with those a mix-up would not show."""
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if "norm" in name or name.endswith("bias"):
                number = chunk.decoder.layers[0].layer_number
                seed = zlib.crc32(f"{number} {name}".encode())
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.add_(0.2 * noise)


def logits(chunk: torch.nn.Module) -> torch.Tensor | None:
    """Megatron's logits `[T, V]` of `tokens()` on the last stage, None elsewhere."""
    from megatron.core import parallel_state as mpu

    ids = tokens()
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        if not chunk.pre_process:
            received = torch.empty(ids.shape[1], 1, SHAPE["hidden_size"])
            dist.recv(received, mpu.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(received)
        out = chunk(ids, positions, None)
        if not chunk.post_process:
            dist.send(out.contiguous(), mpu.get_pipeline_model_parallel_next_rank())
            return None
    group = mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(out) for _ in range(group.size())]
    dist.all_gather(parts, out.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[0]


def arguments(name: str, *, tp: int, pp: int, **changes: Any) -> argparse.Namespace:
    """The command line as Megatron-LM keeps it, with values of its own classes among them."""
    import signal

    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    own = MODELS[name]
    shape = SHAPE | {k: v for k, v in own.items() if k in SHAPE}
    epsilon = shape.pop("layernorm_epsilon")
    return argparse.Namespace(**{
        **shape, "norm_epsilon": epsilon, "group_query_attention": True, "seq_length": 64,
        "max_position_embeddings": 64, "position_embedding_type": "rope", "rotary_percent": 1.0,
        "rotary_base": own["rotary_base"], "rotary_interleaved": False, "vocab_size": own[
            "vocab_size"], "padded_vocab_size": PADDED, "make_vocab_size_divisible_by": 128,
        "use_rope_scaling": own.get("use_rope_scaling", False),
        "rope_scaling_factor": own.get("rope_scaling_factor", 8.0), "swiglu": True,
        "normalization": "RMSNorm", "add_bias_linear": False, "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": own["untie"], "num_experts": None,
        "multi_latent_attention": False, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "iteration": ITERATION, "tokenizer_model": None,
        "tokenizer_type": "HuggingFaceTokenizer", "attention_backend": AttnBackend.auto,
        "model_type": ModelType.encoder_or_decoder, "exit_signal": signal.SIGTERM,
        "params_dtype": torch.float32, **changes,
    })  # fmt: skip


def save(
    root: Path, chunks: list[torch.nn.Module], args: argparse.Namespace, *, form: str,
    numbered: bool = False, fused: bool = False,
) -> None:  # fmt: skip
    """Saves an iteration as Megatron-LM does.

    Args:
        form: "torch_dist" or "torch".
        numbered: layers by number in a torch_dist folder (its `non_homogeneous_layers`).
        fused: Transformer Engine's names and FP8 states in a torch folder.
    """
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    folder = root / f"iter_{ITERATION:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    rng = {"python": random.getstate(), "np_rng_state": np.random.get_state(),
           "torch_rng_state": torch.get_rng_state()}  # fmt: skip
    if form == "torch_dist":
        metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        if numbered:
            metadata["non_homogeneous_layers"] = True
        for name, chunk in zip(names, chunks, strict=True):
            state[name] = chunk.sharded_state_dict(metadata=metadata)
        rank, size = dist.get_rank(), dist.get_world_size()
        state["rng_state"] = ShardedObject("rng_state", [rng], (size,), (rank,), replica_id=0)
        dist_checkpointing.save(state, str(folder))
    else:
        for name, chunk in zip(names, chunks, strict=True):
            tensors = chunk.state_dict_for_save_checkpoint()
            state[name] = _with_te_names(tensors) if fused else tensors
        state |= {"rng_state": [rng], "optimizer": {"exp_avg": torch.zeros(3)}}
        place = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            place += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
        (folder / place).mkdir()
        torch.save(state, folder / place / "model_optim_rng.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}")


def _with_te_names(tensors: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in tensors.items():
        if value is None:  # states of Megatron's own layers
            continue
        key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        found[key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value
        if "linear" in key:
            found[key.rsplit(".", 1)[0] + "._extra_state"] = io.BytesIO(b"state")
    return found


def write_all(rank: int, world: int, root: Path) -> dict[str, torch.Tensor | None]:
    """Every model at TP2 PP2 in the formats that tests read; Megatron's logits by model."""
    found = {}
    for name in MODELS:
        (chunk,) = build(name, tp=2, pp=2)
        args = arguments(name, tp=2, pp=2)
        found[name] = logits(chunk)
        save(root / name, [chunk], args, form="torch_dist")
        if name == "llama":
            save(root / "numbered", [chunk], args, form="torch_dist", numbered=True)
        if name in ("llama", "qwen2"):
            save(root / f"{name}_legacy", [chunk], args, form="torch")
            save(root / f"{name}_fused", [chunk], args, form="torch", fused=True)
    chunks = build("llama", tp=2, pp=2, vpp=2)
    args = arguments("llama", tp=2, pp=2)
    save(root / "vpp", chunks, args, form="torch_dist")
    save(root / "vpp_legacy", chunks, args, form="torch")
    return found


def load_strictly(rank: int, world: int, root: Path, name: str, iteration: int) -> Any:
    """Megatron's own strict load at TP2 PP2, what the file holds beyond it, and its logits."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.validation import StrictHandling

    (chunk,) = build(name, tp=2, pp=2)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state, unused, unexpected = dist_checkpointing.load(
        {"model": chunk.sharded_state_dict(metadata=metadata)},
        str(root / f"iter_{iteration:07d}"), strict=StrictHandling.RETURN_ALL,
    )  # fmt: skip
    chunk.load_state_dict(state["model"], strict=True)
    common = dist_checkpointing.load_common_state_dict(str(root / f"iter_{iteration:07d}"))
    return logits(chunk), sorted(unused), sorted(unexpected), common
