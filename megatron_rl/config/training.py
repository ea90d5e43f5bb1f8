"""Settings of the optimizer steps, of the gradients' way over the network, and of the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .schema import SECTION, section, setting


@dataclass(**SECTION)
class OptimizerSettings:
    """Optimizer and learning rate schedule of one model."""

    name: Literal["adam", "sgd"] = setting("adam")
    """adam is AdamW (decoupled weight decay)."""
    lr: float = setting(1e-6, above=0)
    """Peak learning rate."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of a linear or cosine schedule."""
    schedule: Literal["constant", "linear", "cosine"] = setting("constant")
    """Learning rate after the warm-up."""
    warmup_steps: int = setting(0, at_least=0)
    """Training steps over which the learning rate rises linearly from 0."""
    weight_decay: float = setting(0.0, at_least=0)
    """Weight decay; norms and biases are exempt."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """Adam's decay of the first moment."""
    beta2: float = setting(0.95, at_least=0, below=1)
    """Adam's decay of the second moment."""
    eps: float = setting(1e-8, above=0)
    """Adam's constant in the denominator."""
    momentum: float = setting(0.0, at_least=0, below=1)
    """Momentum of sgd."""
    clip_grad: float = setting(1.0, at_least=0)
    """Largest norm of this model's gradient; 0: no clipping."""


@dataclass(**SECTION)
class GradientCompressionSettings:
    """Gradients in int8 on the wire."""

    enable: bool = setting(False)
    """Reduce gradients over data parallel ranks in int8."""
    method: Literal["int8"] = setting("int8")
    """Format on the wire."""
    block_size: int = setting(256, at_least=32, at_most=65536)
    """Elements that share one scale; a power of two."""
    error_feedback: bool = setting(False)
    """Add what quantisation lost to the next step's gradient."""
    stochastic_rounding: bool = setting(False)
    """Round up or down at random, unbiased; false rounds half to even."""
    exempt: list[str] = setting(["1d"], form=(r".+", "1d or a parameter name pattern"))
    """Parameters in full precision: 1d (norms and biases) or patterns of parameter names."""
    allreduce_fusion: bool = setting(False)
    """One message for the payload and the scales of all buckets of a step."""
    min_bucket_elements: int = setting(65536, at_least=0)
    """Buckets smaller than this travel uncompressed."""
    hierarchical: bool = setting(False)
    """Full precision inside a node, int8 between nodes."""


@dataclass(**SECTION)
class TrainingSettings:
    """Optimizer steps and numerics."""

    steps: int = setting(100, at_least=1)
    """Training steps; each generates one rollout batch."""
    epochs: int = setting(1, at_least=1)
    """Passes over each rollout batch."""
    mini_batch_size: int | None = setting(None, at_least=1)
    """Samples per optimizer step over all replicas; null: the whole rollout batch."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Samples per forward pass on one replica; null: max_tokens_per_micro_batch decides."""
    max_tokens_per_micro_batch: int | None = setting(None, at_least=1)
    """Tokens per forward pass on one replica, packed. Both null: one pass per mini-batch."""
    packing: bool = setting(True)
    """Sequences of a micro-batch stand right behind one another; false pads them to the longest."""
    dtype: Literal["fp32", "bf16", "fp16"] = setting("fp32")
    """Type of weights and activations; gradients are reduced and applied in fp32."""
    fp32_logits: bool = setting(True)
    """Logits of half precision products stay fp32; false rounds them, for half the memory."""
    grad_reduce: Literal["ddp", "distributed_optimizer", "manual"] = setting(
        "distributed_optimizer"
    )
    """ddp: all-reduce; distributed_optimizer: reduce-scatter; manual: one all-reduce at the end."""
    recompute: Literal["none", "selective", "full"] = setting("none")
    """Activations computed again in the backward pass, to save memory."""
    deterministic: bool = setting(False)
    """Only kernels that give the same bits on every run."""
    actor: OptimizerSettings = section(OptimizerSettings)
    """Optimizer of the actor."""
    critic: OptimizerSettings = section(OptimizerSettings, lr=1e-5)
    """Optimizer of the critic."""
    gradient_compression: GradientCompressionSettings = section(GradientCompressionSettings)
    """Gradients in int8 on the wire."""

    @property
    def distributed_optimizer(self) -> bool:
        """Whether optimizer state is sharded over data parallel ranks."""
        return self.grad_reduce == "distributed_optimizer"


@dataclass(**SECTION)
class OffloadSettings:
    """Keep something in host memory between its uses."""

    enable: bool = setting(False)
    """Offload it."""
    offload_device: Literal["cpu"] | None = setting(None)
    """Where it goes; must be cpu when offloading is enabled."""
    pin_memory: bool = setting(True)
    """Page-locked host memory: faster copies that can overlap."""
    num_threads: int = setting(1, at_least=1)
    """Threads that copy on the host side."""


@dataclass(**SECTION)
class HybridEngineSettings:
    """The way from the training layout to the generation layout, and memory levers."""

    mode: Literal["zero_repartitioning", "micro_dp", "auto"] = setting("zero_repartitioning")
    """Generate on the training shards, on a smaller layout, or on what a cost model picks."""
    micro_dp_size: int | None = setting(None, at_least=1)
    """Generation replicas inside a training replica; tp*pp/(generation_tp*generation_pp)."""
    generation_tp: int | None = setting(None, at_least=1)
    """Tensor parallel size in generation; divides parallel.tp. null: what the others leave."""
    generation_pp: int | None = setting(None, at_least=1)
    """Pipeline parallel size in generation; divides parallel.pp. null: what the others leave."""
    share_embeddings: Literal[False, "read_only", "joint"] = setting(False)
    """The critic reads the actor's embedding table (read_only) or also trains it (joint)."""
    keep_generation_weights: bool = setting(False)
    """Keep the buffers of gathered weights between steps instead of freeing them."""
    actor_offload: OffloadSettings = section(OffloadSettings)
    """Offload of the actor while it is not used."""
    critic_offload: OffloadSettings = section(OffloadSettings)
    """Offload of the critic while it is not used."""
    reference_offload: OffloadSettings = section(OffloadSettings)
    """Offload of the reference model while it is not used."""
    reward_offload: OffloadSettings = section(OffloadSettings)
    """Offload of the reward model while it is not used."""
    optimizer_offload: OffloadSettings = section(OffloadSettings)
    """Offload of the optimizer states outside the update."""

    def generation_layouts(self, tp: int, pp: int) -> list[tuple[int, int]]:
        """(tp, pp) of every generation layout inside a training layout that the settings allow.

        The one with the fewest pipeline stages comes first: a decoded token passes all of them.
        With only one of the two sizes given, and no micro_dp_size, the other one stays as it is.
        """
        given_tp, given_pp, replicas = self.generation_tp, self.generation_pp, self.micro_dp_size
        if replicas is None and given_tp is not None:
            given_pp = given_pp or pp
        if replicas is None and given_pp is not None:
            given_tp = given_tp or tp
        return [
            (t, p)
            for p in range(1, pp + 1)
            for t in range(1, tp + 1)
            if tp % t == 0 and pp % p == 0 and given_tp in (None, t) and given_pp in (None, p)
            and replicas in (None, tp * pp // (t * p))
        ]  # fmt: skip
