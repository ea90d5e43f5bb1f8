"""The lowest kept logit under top-k and top-p, exact over vocabulary shards.

    top-k keeps the k largest logits; top-p (Holtzman et al. 2020) then keeps the fewest of the
    largest whose share of the remaining mass reaches p. Equal logits are kept or cut together.

Both are "the largest t whose tail Σ_{x ≥ t} weight reaches a target": weight 1 and target k, or
weight exp(x/τ) and target p · mass. The search fixes t four bits at a time, from the top, on an
order-preserving integer form of fp32: 8 rounds (4 on bf16), each one pass and one sum of 16
integers per row over the shards. Masses are fixed-point integers, so sums have no rounding and the
threshold does not depend on how the vocabulary is cut. Nothing is read back to the host.

Shapes: T rows, V columns of the shard, 16 values of a 4-bit digit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend import use_triton
from .arguments import check_rows

DIGIT_BITS = 4
DIGITS = 1 << DIGIT_BITS
# exp(x/τ − max) as an integer: 2^24 tokens of the largest mass still sum below 2^63.
MASS_SCALE = float(1 << 38)
SIGN_32 = 1 << 31
MASK_32 = (1 << 32) - 1
KEY_OF_MINUS_INFINITY = 0x007FFFFF
# Low bits of the fp32 form that tell no two values of the dtype apart, in whole digits.
IDLE_BITS = {torch.bfloat16: 16, torch.float16: 12}


def kept_threshold(
    logits_TV: Tensor,
    temperature_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    top_k_T: Tensor | None = None,
    top_p_T: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """Each row's lowest kept logit, to be passed to `sample_shard` as `threshold_T`.

    Args:
        logits_TV: `[T, V]` bf16, fp16 or fp32 without NaN, last dimension contiguous.
        temperature_T: fp32 `[T]` ≥ 0 (0 counts masses at τ = 1).
        vocab_size, vocab_start: as in `sample_shard`.
        top_k_T: int64 `[T]`, a row ≤ 0 keeps all; None: no row has a top-k.
        top_p_T: fp32 `[T]` > 0, a row ≥ 1 keeps all; None: no row has a top-p.
        group: ranks that hold the other shards; None: this shard is the whole vocabulary.
        backend: `auto`, `triton` or `torch`.

    Returns:
        fp32 `[T]`; −inf where a row keeps all. For bf16 and fp16 logits a negative threshold may
        lie between the lowest kept logit and the next value below it.

    Raises:
        ValueError: shapes or devices that do not fit, or a vocabulary above 2^24.
    """
    check_rows(logits_TV, vocab_size, temperature_T, top_k_T, top_p_T)
    real = max(0, min(logits_TV.shape[1], vocab_size - vocab_start))
    logits_TV = logits_TV[:, :real]
    search = _Search(logits_TV, temperature_T, group, use_triton("sampling", logits_TV, backend))
    key_T = torch.zeros(len(logits_TV), dtype=torch.int64, device=logits_TV.device)
    if top_k_T is not None:
        key_T = torch.where(top_k_T > 0, search.largest_key(top_k_T.long(), weighted=False), 0)
    if top_p_T is not None:
        mass_T = search.tails(key_T, 0, weighted=True)[:, 0]
        # fp64 holds p · mass to one part in 2^53; every rank computes the same target.
        target_T = (top_p_T.double() * mass_T.double()).ceil().long().clamp(min=1)
        key_T = torch.where(top_p_T < 1, search.largest_key(target_T, weighted=True), key_T)
    return _key_to_float(key_T)


class _Search:
    """Tail sums of one batch of logits over all shards, and the search on top of them."""

    def __init__(
        self,
        logits_TV: Tensor,
        temperature_T: Tensor,
        group: dist.ProcessGroup | None,
        triton: bool,
    ) -> None:
        self.logits_TV, self.group, self.triton = logits_TV, group, triton
        self.tau_T = torch.where(temperature_T > 0, temperature_T, 1.0)
        self.top_T = torch.full_like(self.tau_T, -torch.inf)
        if logits_TV.shape[1]:
            self.top_T = logits_TV.amax(-1).float()
        if group is not None:
            dist.all_reduce(self.top_T, dist.ReduceOp.MAX, group)

    def largest_key(self, target_T: Tensor, *, weighted: bool) -> Tensor:
        """The largest key whose tail reaches the target; 0 where none does."""
        key_T = torch.zeros_like(target_T)
        lowest = IDLE_BITS.get(self.logits_TV.dtype, 0)
        for shift in range(32 - DIGIT_BITS, lowest - 1, -DIGIT_BITS):
            tails_T16 = self.tails(key_T, shift, weighted)
            digit_T = (tails_T16[:, 1:] >= target_T[:, None]).sum(-1)
            key_T = key_T + (digit_T << shift)
        return key_T

    def tails(self, key_T: Tensor, shift: int, weighted: bool) -> Tensor:
        """Σ of weights with key ≥ key_T + (d << shift) for each digit d, int64 `[T, 16]`."""
        if self.triton:
            from .threshold_kernel import tail_sums
        else:
            tail_sums = _tail_sums
        sums_T16 = tail_sums(self.logits_TV, self.tau_T, self.top_T, key_T, shift, weighted)
        if self.group is not None:
            dist.all_reduce(sums_T16, dist.ReduceOp.SUM, self.group)
        return sums_T16


def _tail_sums(
    logits_TV: Tensor, tau_T: Tensor, top_T: Tensor, key_T: Tensor, shift: int, weighted: bool
) -> Tensor:
    """One shard's tail sums in plain torch: a histogram of digits, summed from the top."""
    logits_TV = logits_TV.float() + 0.0  # makes −0 and 0 one key
    above_TV = _float_to_key(logits_TV).sub_(key_T[:, None])
    weight_TV = (above_TV >= 0).long()
    if weighted:
        # The order of operations is the Triton version's: logits over τ, not a difference over τ.
        exponent_TV = logits_TV / tau_T[:, None] - (top_T / tau_T)[:, None]
        weight_TV *= (exponent_TV.exp_() * MASS_SCALE).long()
    digit_TV = (above_TV >> shift).clamp_(0, DIGITS - 1)
    histogram_T16 = key_T.new_zeros((len(key_T), DIGITS)).scatter_add_(1, digit_TV, weight_TV)
    return histogram_T16.flip(-1).cumsum(-1).flip(-1)


def _float_to_key(x: Tensor) -> Tensor:
    """fp32 to integers of the same order, int64 in [0, 2^32): flip the sign bit, or all if set."""
    bits = x.view(torch.int32).long() & MASK_32
    return torch.where(bits >= SIGN_32, MASK_32 - bits, bits + SIGN_32)


def _key_to_float(key: Tensor) -> Tensor:
    bits = torch.where(key >= SIGN_32, key - SIGN_32, MASK_32 - key)
    signed = torch.where(bits >= SIGN_32, bits - (1 << 32), bits).to(torch.int32)
    # Keys below −inf's are NaN patterns; the search ends there when no tail reaches its target.
    return torch.where(key > KEY_OF_MINUS_INFINITY, signed.view(torch.float32), -torch.inf)
