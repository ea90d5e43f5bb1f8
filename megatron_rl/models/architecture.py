"""What a model computes, independent of any file format and of any parallel layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding parameters (Su et al. 2021; Llama 3.1 frequency scaling)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in the place of every feed-forward layer (Shazeer et al. 2017).

    Attributes:
        count: experts of a layer.
        per_token: how many of them a token goes through: those of the largest probability.
        normalised: their probabilities are scaled to sum to one.
    """

    count: int
    per_token: int
    normalised: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder-only transformer, independent of any parallel layout.

    `heads`/`kv_heads` are those of the checkpoint; `padded_…` say what a layout computes with.
    `padded_for` is the tensor parallel size whose padding is used instead of the layout's own: a
    generation model that takes over a training model's shards takes over their padding.
    `max_positions` is the longest sequence that the model may see. `ffn` is the size of the
    feed-forward layer, or of one expert.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    max_positions: int
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False
    padded_for: int | None = None
    experts: Experts | None = None

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_heads

    def padded_kv_heads(self, tp: int) -> int:
        """KV heads after padding: unchanged where `tp` divides or is divided by them."""
        tp = self.padded_for or tp
        if self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and self.heads % tp == 0):
            return self.kv_heads
        return -(-self.kv_heads // tp) * tp

    def padded_heads(self, tp: int) -> int:
        """Query heads after padding by whole groups of zero heads (exact: their output
        projection columns are zero, so they add nothing and receive no gradient)."""
        return self.padded_kv_heads(tp) * self.heads_per_group

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows after padding to a multiple of `tp`."""
        tp = self.padded_for or tp
        return -(-self.vocab // tp) * tp

    def parameters(self) -> int:
        """Number of parameters of the language model (without padding)."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        mlp = 3 * self.ffn if self.experts is None else self.experts.count * (3 * self.ffn + 1)
        layer = self.hidden * (qkv + self.heads * self.head_dim + mlp + 2)
        layer += qkv * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (2 - self.tied)

    def check_layout(self, *, tp: int, pp: int, vpp: int, name: str, ep: int = 1) -> None:
        """Refuses layouts that this architecture can't be cut into.

        Raises:
            ValueError: naming the setting, the rule and the values that fit.
        """
        if self.layers % (pp * vpp):
            fits = [p for p in range(1, self.layers + 1) if self.layers % (p * vpp) == 0]
            raise ValueError(
                f"parallel.pp={pp} with parallel.vpp={vpp} does not fit {name}: its {self.layers} "
                f"layers must divide into pp × vpp equal stages; pp that fits: {fits}"
            )
        if self.experts is None:
            ep = 1  # a dense model beside one with experts: nothing of it is spread by expert
        elif self.experts.count % ep:
            count = self.experts.count
            fits = [e for e in range(1, tp + 1) if tp % e == 0 and count % e == 0]
            raise ValueError(
                f"parallel.ep={ep} does not fit {name}: it has {count} experts, which must be a "
                f"multiple of ep; ep that fits: {fits}"
            )
        if self.ffn % (tp // ep):
            fits = [t for t in (1, 2, 4, 8, 16) if self.ffn % t == 0]
            cut = "tp" if self.experts is None else "tp / ep"
            raise ValueError(
                f"parallel.tp={tp} with parallel.ep={ep} does not fit {name}: its feed-forward "
                f"size {self.ffn} must be a multiple of {cut}; {cut} that fits: {fits}"
            )
