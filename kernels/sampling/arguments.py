"""What every sampling function asks of its arguments, said in one sentence each."""

from __future__ import annotations

from torch import Tensor

# Token ids travel in fp32 records, which hold integers exactly up to here.
MAX_VOCAB = 2**24


def check_rows(logits_TV: Tensor, vocab_size: int, *per_row: Tensor | None) -> None:
    """Raise ValueError unless logits, vocabulary size and the per-row tensors fit together."""
    if logits_TV.ndim != 2 or logits_TV.shape[1] == 0 or logits_TV.stride(-1) != 1:
        raise ValueError(
            "logits must be [T, V] with V > 0 and contiguous rows, got "
            f"{tuple(logits_TV.shape)} with strides {logits_TV.stride()}"
        )
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and {MAX_VOCAB}")
    for tensor in per_row:
        if tensor is None:
            continue
        if tensor.shape != logits_TV.shape[:1]:
            raise ValueError(
                f"{len(logits_TV)} rows need per-row tensors of that length, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.device != logits_TV.device:
            raise ValueError(f"per-row tensor on {tensor.device}, logits on {logits_TV.device}")
