"""Sampling one token per row against the memory floor and torch: one table on one GPU.

    python -m megatron_rl.kernels.sampling.bench

The floor is one read of the logits. The torch peer is softmax, multinomial and log_softmax of the
drawn token, the least eager code that yields a token and its log-probability; for the threshold
it is a sort, cumulative sum and gather. The last line counts how often an fp32 inverse CDF on four
shards picks another token than on one, and how often this kernel does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..timing import copy_bandwidth, median_ms
from . import kept_threshold, merge, sample, sample_shard

VOCABULARY = 128256


def torch_sample(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    token_T1 = torch.multinomial(logits_TV.float().softmax(-1), 1)
    return token_T1, logits_TV.float().log_softmax(-1).gather(1, token_T1)


def torch_threshold(logits_TV: Tensor, top_p_T: Tensor) -> Tensor:
    ordered_TV = logits_TV.float().sort(-1, descending=True).values
    share_TV = ordered_TV.softmax(-1)
    kept_T = (share_TV.cumsum(-1) - share_TV < top_p_T[:, None]).sum(-1, keepdim=True)
    return ordered_TV.gather(1, kept_T - 1)


def time_row(rows: int, dtype: torch.dtype, copy: float) -> str:
    batches = [
        torch.randn(rows, VOCABULARY, device="cuda").mul_(2).to(dtype)
        for _ in range(1 + int(1.8e8 // (rows * VOCABULARY * dtype.itemsize)))
    ][:8]
    tau = torch.ones(rows, device="cuda")
    stream = torch.arange(rows, device="cuda")
    top_p = torch.full((rows,), 0.9, device="cuda")

    def draw(x: Tensor, threshold: Tensor | None = None):
        return sample(x, tau, stream, stream, vocab_size=VOCABULARY, threshold_T=threshold)

    def threshold(x: Tensor) -> Tensor:
        return kept_threshold(x, tau, vocab_size=VOCABULARY, top_p_T=top_p)

    floor = rows * VOCABULARY * dtype.itemsize / copy * 1e6
    calls = {
        "ours": draw,
        "kept": lambda x: draw(x, tau),
        "torch": torch_sample,
        "top-p": threshold,
        "torch top-p": lambda x: torch_threshold(x, top_p),
    }
    times = {
        name: 1e3 * median_ms([lambda x=x, call=call: call(x) for x in batches])
        for name, call in calls.items()
    }
    figures = " | ".join(f"{time:.1f}" for time in times.values())
    return f"| {rows} | {dtype} | {floor:.1f} | {floor / times['ours']:.0%} | {figures} |"


def moved_tokens(rows: int = 8192, shards: int = 4) -> tuple[int, int]:
    """Tokens that change when the vocabulary is cut: (fp32 inverse CDF, this kernel)."""
    logits = torch.randn(rows, VOCABULARY, device="cuda")
    uniform = torch.rand(rows, 1, device="cuda")
    mass = (logits - logits.amax(-1, keepdim=True)).exp()
    one = torch.searchsorted(mass.cumsum(-1), uniform * mass.sum(-1, keepdim=True)).squeeze(1)
    parts = mass.chunk(shards, dim=-1)
    sums = torch.stack([part.sum(-1) for part in parts], dim=-1)
    ends = sums.cumsum(-1)
    target = uniform * ends[:, -1:]
    owner = torch.searchsorted(ends, target).clamp(max=shards - 1)
    local = target - (ends - sums).gather(1, owner)
    ids = torch.stack([torch.searchsorted(p.cumsum(-1), local).squeeze(1) for p in parts], dim=-1)
    many = ids.gather(1, owner).squeeze(1) + owner.squeeze(1) * parts[0].shape[1]

    tau, stream = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    whole = sample(logits, tau, stream, stream, vocab_size=VOCABULARY).token_T
    width = VOCABULARY // shards
    records = [
        sample_shard(
            part, tau, stream, stream, vocab_size=VOCABULARY, vocab_start=shard * width
        )
        for shard, part in enumerate(logits.chunk(shards, dim=-1))
    ]  # fmt: skip
    cut = merge(torch.stack(records)).token_T
    return int((one != many).sum()), int((whole != cut).sum())


def main() -> None:
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, V={VOCABULARY}, copy {copy / 1e12:.2f} TB/s, in us")
    print("| B | dtype | floor | of floor | ours | ours, kept | torch | ours top-p | torch top-p |")
    print("|---|---|---|---|---|---|---|---|---|")
    for rows in (1, 64, 256):
        for dtype in (torch.float32, torch.bfloat16):
            print(time_row(rows, dtype, copy), flush=True)
    inverse, ours = moved_tokens()
    print(f"tokens of 8192 that change on 4 shards: inverse CDF {inverse}, Gumbel-max {ours}")


if __name__ == "__main__":
    main()
