"""A generated model folder of gigabytes, and programs whose memory is measured on it."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import torch

from megatron_rl.convert.model_folder import TensorInfo, stored_rules
from megatron_rl.convert.safetensors_file import SafetensorsWriter
from megatron_rl.convert.staging import fill_files
from megatron_rl.models.families import architecture_from_config

TWO_GB = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=18, vocab_size=32000)
SEVEN_B = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000)


def write_large_model(folder: Path, shape: dict, *, shard_bytes: int = 5 * 10**9) -> Path:
    """A Llama of random bf16 weights, written tensor by tensor."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_attention_heads": shape["hidden_size"] // 128, "rms_norm_eps": 1e-5,
        "num_key_value_heads": shape["hidden_size"] // 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        **shape,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    arch = architecture_from_config(config, source="generated")
    infos = {
        name: TensorInfo(shape=shape, dtype=torch.bfloat16)
        for rule in stored_rules(arch, "lm").values()
        for name, shape in rule.shapes(arch).items()
    }
    noise = torch.randn(2**24).bfloat16() * 0.02
    groups = fill_files({name: info.nbytes for name, info in infos.items()}, shard_bytes)
    weight_map = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        with SafetensorsWriter(folder / file, {n: infos[n] for n in names}) as writer:
            for name in names:
                writer.add(name, _tensor(noise, infos[name].shape, seed=len(weight_map)))
                weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _tensor(noise: torch.Tensor, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Different for every seed, without drawing gigabytes of numbers."""
    count = torch.Size(shape).numel()
    copies = noise.roll(seed * 1009).repeat(-(-count // len(noise)))
    return copies[:count].view(shape)


def peak_bytes() -> int:
    """The most memory that this process has had, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_rank(folder: str, kind: str) -> None:
    """One rank of a tensor parallel start: prints its peak memory and the size of its shard."""
    import torch.distributed as dist

    from megatron_rl import cuda_on_cpu
    from megatron_rl.convert.kinds import open_model
    from megatron_rl.convert.load import load_weights
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    cuda_on_cpu.enable()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    groups = ParallelGroups(layout=Layout(world_size=world, tp=world))
    seed_model_parallel(0, groups)
    opened = open_model(folder, "actor")
    opened.check()
    model = build_model("actor", opened.architecture, groups, dtype="bf16")
    load_weights(model, opened)
    shard = sum(p.nbytes for _, p in model.named_parameters())
    total = sum(float(p.double().sum()) for _, p in model.named_parameters() if p.dim() == 1)
    print(json.dumps({"peak": peak_bytes(), "shard": shard, "norms": total}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "load":
        load_rank(*sys.argv[2:])
    elif sys.argv[1] == "convert":
        from megatron_rl.convert.__main__ import main

        code = main(sys.argv[2:])
        print(json.dumps({"peak": peak_bytes(), "code": code}), flush=True)
    else:
        write_large_model(Path(sys.argv[2]), SEVEN_B)
    sys.stdout.flush()
    os._exit(0)
