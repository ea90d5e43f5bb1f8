"""A training step that any layout can run: the same sequences, weights and loss everywhere."""

from __future__ import annotations

import torch

LENGTHS = [(3, 5), (1, 9), (6, 2), (4, 4), (2, 1), (5, 7)]
"""(prompt, response) tokens of each sequence; the micro-batches are of unequal size."""


def sequences(vocab: int = 256, seed: int = 3) -> tuple[list[torch.Tensor], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocab, (p + r,), generator=generator) for p, r in LENGTHS]
    return tokens, [p for p, _ in LENGTHS]


def token_weights(seed: int = 4) -> torch.Tensor:
    """`[B, R]`: positive and negative, zero outside the response."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(r for _, r in LENGTHS)
    weights = torch.randn(len(LENGTHS), longest, generator=generator)
    lengths = torch.tensor([r for _, r in LENGTHS])
    mask = torch.arange(longest)[None] < lengths[:, None]
    return weights * mask / mask.sum()


def build(
    folder, world, *, role="actor", tp=1, pp=1, vpp=1, ep=1, sp=False, dtype="fp32",
    recompute="none", optimizer="sgd", distributed_optimizer=False, overlap=False, clip_grad=0.0,
    lr=0.1, weight_decay=0.0, overlap_gather=False, one_all_reduce=False,
):  # fmt: skip
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=world, tp=tp, pp=pp, vpp=vpp, ep=ep))
    seed_model_parallel(0, groups)
    model = build_model(
        role, read_architecture(folder), groups, dtype=dtype, sp=sp, recompute=recompute,
        trainable=True,
    )  # fmt: skip
    load_huggingface(model, folder, fresh_head=role == "critic")
    settings = OptimizerSettings(
        name=optimizer, lr=lr, clip_grad=clip_grad, eps=1e-3, weight_decay=weight_decay
    )
    return Trainable(
        model, settings, total_steps=10, distributed_optimizer=distributed_optimizer,
        one_all_reduce=one_all_reduce, overlap_grad_reduce=overlap,
        overlap_param_gather=overlap_gather,
    )  # fmt: skip


def microbatches(model, micro_batch_size):
    """This replica's micro-batches and the number that every replica runs."""
    from megatron_rl.engine.microbatch import pack, partition

    tokens, prompts = sequences()
    dp, rank = model.groups.layout.dp, model.groups.dp_rank
    mine = list(range(rank, len(tokens), dp))
    most = len(range(0, len(tokens), dp))
    count = -(-most // micro_batch_size)
    parts = partition(
        [len(tokens[i]) for i in mine], micro_batch_size=micro_batch_size, max_tokens=None
    )
    fields = {"weights": token_weights()}
    return [
        pack(
            [tokens[mine[i]] for i in part], [prompts[mine[i]] for i in part], model=model,
            rows="response", samples=[mine[i] for i in part], fields=fields,
        )
        for part in parts
    ], count  # fmt: skip


def policy_objective(model):
    """Σ weights · log-prob, as a Megatron loss function."""
    from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs

    def loss(logits, batch):
        logp = vocab_parallel_logprobs(
            logits, batch.labels_N, group=model.groups.tp, vocab_start=model.vocab_start,
            vocab_size=model.arch.vocab, padded_vocab_size=model.padded_vocab,
        )  # fmt: skip
        value = (batch.fields["weights"] * logp).sum()
        return value, {"loss": value.detach().clone()}

    return loss


def value_objective(model):
    """Σ weights · value²."""

    def loss(values, batch):
        value = (batch.fields["weights"] * (values - 1.0).square()).sum()
        return value, {"loss": value.detach().clone()}

    return loss


def reference(folder, dtype=torch.float64):
    """Loss and gradients by transformers and autograd, no Megatron: name → gradient."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped one knows no float64
    tokens, prompts = sequences()
    weights = token_weights().to(dtype)
    total = torch.zeros((), dtype=dtype)
    for i, (sequence, prompt) in enumerate(zip(tokens, prompts, strict=True)):
        logp = model(sequence[None]).logits[0].log_softmax(-1)
        rows = torch.arange(prompt - 1, len(sequence) - 1)
        total = total + (weights[i, : len(rows)] * logp[rows, sequence[rows + 1]]).sum()
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total.item(), as_stored(grads)


def as_stored(tensors):
    """Under the names of the files: transformers fuses experts when it loads them."""
    found = {}
    for name, x in tensors.items():
        if name.endswith(".mlp.gate.weight"):
            name = name.replace(".mlp.", MOE_BLOCK[len(x)])
        if ".experts." not in name:
            found[name] = x
            continue
        mixtral = MOE_BLOCK[len(x)] == ".block_sparse_moe."
        parts = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
        prefix = name.replace(".mlp.", MOE_BLOCK[len(x)]).rsplit(".", 1)[0]
        for expert, matrix in enumerate(x):
            pieces = dict(zip(parts, matrix.chunk(2), strict=True))
            if name.endswith("down_proj"):
                pieces = {"w2" if mixtral else "down_proj": matrix}
            found |= {f"{prefix}.{expert}.{part}.weight": v for part, v in pieces.items()}
    return found


MOE_BLOCK = {4: ".block_sparse_moe.", 8: ".mlp."}
"""By number of experts: the tiny Mixtral has four, the tiny Qwen3-MoE eight."""
