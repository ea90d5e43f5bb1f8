"""Settings of the models, their tokenizer and their parallel layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .schema import SECTION, refuse, section, setting


@dataclass(**SECTION)
class RoleParallel:
    """A layout of its own for one model, over the same ranks as the others."""

    tp: int = setting(1, at_least=1)
    """Tensor parallel size of this model."""
    pp: int = setting(1, at_least=1)
    """Pipeline parallel size of this model."""
    vpp: int = setting(1, at_least=1)
    """Virtual pipeline stages per rank of this model; 1 means none."""
    ep: int = setting(1, at_least=1)
    """Expert parallel size of this model, see parallel.ep."""


@dataclass(**SECTION)
class ModelRole:
    """Where the weights of one model come from and how they are laid out."""

    path: str | None = setting(None)
    """Model folder (of any kind) or hub id. Critic and reference: null starts from the actor's."""
    revision: str | None = setting(None)
    """Branch, tag or commit of a hub id; null takes the default branch."""
    parallel: RoleParallel | None = None
    """Layout of this model; null uses the section `parallel`."""


@dataclass(**SECTION)
class FrozenRole(ModelRole):
    """A model that is read and never trained."""

    ranks: list[int] | None = setting(None, at_least=0)
    """Ranks that hold this model and train nothing; null: all ranks, beside the other models."""


@dataclass(**SECTION)
class ReferenceRole(FrozenRole):
    """The frozen policy that the KL divergence is measured against."""

    enable: bool = setting(True)
    """Keep a reference model. Without one there is neither a KL penalty nor the KL metric."""


@dataclass(**SECTION)
class TokenizerSettings:
    """The tokenizer that all models share."""

    type: Literal["huggingface", "sentencepiece"] = setting("huggingface")
    """Format of the tokenizer files."""
    path: str | None = setting(None)
    """Folder, file or hub id of the tokenizer; null takes the one in the actor's folder."""
    revision: str | None = setting(None)
    """Branch, tag or commit of the tokenizer's hub id; null takes the default branch."""
    bos_token: str | None = setting(None)
    """Piece that begins a text (SentencePiece only); null takes the file's."""
    eos_token: str | None = setting(None)
    """Piece that ends a response (SentencePiece only); null takes the file's."""
    pad_token: str | None = setting(None)
    """Piece that pads a text (SentencePiece only), left out of responses; null: the file's."""


@dataclass(**SECTION)
class ModelSettings:
    """The four models, their tokenizer, and how their layers are computed."""

    actor: ModelRole = section(ModelRole)
    """The policy that is trained."""
    critic: ModelRole = section(ModelRole)
    """The value model; exists when algorithm.name is ppo."""
    reference: ReferenceRole = section(ReferenceRole)
    """The frozen policy for the KL divergence."""
    reward: FrozenRole = section(FrozenRole)
    """A learned reward model (a sequence classifier with one label); a null path: there is none."""
    tokenizer: TokenizerSettings = section(TokenizerSettings)
    """The tokenizer that all models share."""
    trust_remote_code: bool = setting(False)
    """Allow Python code inside a model folder to run. Only for folders whose code you read."""
    attention_backend: Literal["auto", "torch", "varlen"] = setting("auto")
    """Attention in training: torch (per sequence), varlen (packed; CUDA, bf16 or fp16), or auto."""
    layer_spec: Literal["auto", "local", "te"] = setting("auto")
    """Linear layers and norms: local (ours), te (Transformer Engine); auto: te when it imports."""


@dataclass(**SECTION)
class ParallelSettings:
    """How each model is cut over the ranks; what remains is data parallelism."""

    tp: int = setting(1, at_least=1)
    """Tensor parallel size: ranks that share every layer."""
    pp: int = setting(1, at_least=1)
    """Pipeline parallel size: stages of consecutive layers."""
    vpp: int = setting(1, at_least=1)
    """Virtual pipeline stages per rank (interleaved schedule); 1 means none."""
    cp: int = setting(1, at_least=1)
    """Context parallel size."""
    ep: int = setting(1, at_least=1)
    """Expert parallel size: parts of a tensor parallel group that hold whole experts."""
    sp: bool = setting(False)
    """Sequence parallelism: norms and dropouts split over the sequence; needs tp > 1."""
    overlap_grad_reduce: bool = setting(False)
    """Reduce gradients bucket by bucket during the backward pass."""
    overlap_param_gather: bool = setting(False)
    """Gather updated parameters during the next forward pass (distributed optimizer only)."""

    def validate_world(self, world_size: int, *, prefix: str = "parallel") -> int:
        """The data parallel size on ``world_size`` ranks.

        Raises:
            ConfigError: tp*pp does not divide the world; the message lists the pairs that do.
        """
        return data_parallel_size(self.tp, self.pp, world_size, prefix=prefix)


def data_parallel_size(
    tp: int, pp: int, world_size: int, *, prefix: str, whose: str = "of this run"
) -> int:
    """``world_size / (tp*pp)``, or a ConfigError that says which tp and pp would fit.

    Args:
        whose: which ranks these are, for the message.
    """
    if world_size % (tp * pp) == 0:
        return world_size // (tp * pp)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    fitting_tp = [size for size in sizes if world_size % (size * pp) == 0]
    fitting_pp = [size for size in sizes if world_size % (size * tp) == 0]
    ways = []
    if fitting_tp:
        ways.append(f"with pp={pp} use {prefix}.tp in {fitting_tp}")
    if fitting_pp:
        ways.append(f"with tp={tp} use {prefix}.pp in {fitting_pp}")
    start = "start" if whose == "of this run" else "have"
    ways.append(f"or {start} a multiple of {tp * pp} ranks")
    rule = f"tp*pp = {tp}*{pp} = {tp * pp} must divide the {world_size} ranks {whose}"
    refuse(f"{prefix}.tp", tp, rule, ", ".join(ways))
