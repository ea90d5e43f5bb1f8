"""Builds Megatron-Core `GPTModel`s for any role under one layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.models.architecture import Architecture, Experts, Rope
from megatron_rl.models.attention import AttentionBatch, CoreAttention
from megatron_rl.models.heads import ValueHead, select_rows, vocabulary_logits
from megatron_rl.models.layers import block_spec, transformer_engine_available
from megatron_rl.parallel import ParallelGroups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ModelConfig(TransformerConfig):
    """Megatron's transformer config plus what our attention needs.

    Attributes:
        window: tokens that attention sees, the query's own included; None: all before it.
        experts: of every layer; None: dense layers.
    """

    rope: Rope = field(default_factory=Rope)
    packed_attention: str = "auto"
    window: int | None = None
    fp32_logits: bool = True
    experts: Experts | None = None


class RLModel(GPTModel):
    """A `GPTModel` whose last stage computes a head over chosen rows only.

    The head is `output_layer`: vocabulary logits `[N, V/tp]` for "lm", values `[N]` for "value".
    """

    def __init__(self, *, head: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.head = head
        if head == "value" and self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size)

    def _postprocess(
        self, hidden_states: Tensor, *args, packed_seq_params: AttentionBatch, **kwargs
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        hidden_NE = select_rows(
            hidden_states, packed_seq_params.rows_N, tp_group=self.pg_collection.tp,
            sequence_parallel=self.config.sequence_parallel, sharded=self.head == "lm",
        )  # fmt: skip
        if packed_seq_params.hidden_only:
            return hidden_NE
        if self.head == "value":
            return self.output_layer(hidden_NE)
        return vocabulary_logits(hidden_NE, self.head_weight(), fp32=self.config.fp32_logits)

    def head_weight(self) -> Tensor:
        """Vocabulary rows `[V/tp, E]` of the output layer (the embedding's where tied)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


@dataclass(kw_only=True)
class ParallelModel:
    """One role's model on this rank: its chunks (one per virtual stage) and how it is cut.

    Attributes:
        role: "actor", "critic", "reference" or "reward".
        chunks: bare modules. `wrapped` holds what the schedules call: the DDP wrappers of a
            trained model, otherwise the chunks themselves.
    """

    role: str
    arch: Architecture
    groups: ParallelGroups
    config: ModelConfig
    chunks: list[RLModel]
    wrapped: list[torch.nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wrapped = self.wrapped or list(self.chunks)

    @property
    def head(self) -> str:
        return self.chunks[0].head

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    @property
    def padded_vocab(self) -> int:
        return self.arch.padded_vocab(self.groups.layout.tp)

    @property
    def vocab_start(self) -> int:
        """First vocabulary id of this rank's shard."""
        return self.padded_vocab // self.groups.layout.tp * self.groups.tp_rank

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters with names that are unique over pipeline stages: layer numbers are global."""
        for chunk in self.chunks:
            offset = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
            for name, parameter in chunk.named_parameters():
                yield globalise_layer(name, offset), parameter


def globalise_layer(name: str, offset: int) -> str:
    """`decoder.layers.3.x` of a stage that starts at `offset` → `decoder.layers.{3+offset}.x`."""
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    return f"decoder.layers.{int(number) + offset}.{rest}"


def transformer_config(
    arch: Architecture, groups: ParallelGroups, *, dtype: str, sp: bool, recompute: str,
    attention: str = "auto",
    window: int | None = None,
    fp32_logits: bool = True,
) -> ModelConfig:  # fmt: skip
    """Megatron's configuration of `arch` under a layout.

    `calculate_per_token_loss` makes Megatron's DDP sum gradients instead of averaging them: our
    losses are already divided by global counts (see engine/schedule.py).
    """
    layout, torch_dtype = groups.layout, DTYPES[dtype]
    recompute_args = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }[recompute]  # fmt: skip
    interleaved = layout.vpp > 1
    expert_args = {}
    if arch.experts is not None:
        expert_args = {
            "experts": arch.experts, "num_moe_experts": arch.experts.count,
            "moe_router_topk": arch.experts.per_token, "moe_ffn_hidden_size": arch.ffn,
            "moe_router_pre_softmax": True, "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32", "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.tp // layout.ep,
        }  # fmt: skip
    return ModelConfig(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.padded_heads(layout.tp),
        num_query_groups=arch.padded_kv_heads(layout.tp), kv_channels=arch.head_dim,
        normalization="RMSNorm", layernorm_epsilon=arch.norm_eps, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm, hidden_dropout=0.0, attention_dropout=0.0, rope=arch.rope,
        packed_attention=attention,
        window=window,
        fp32_logits=fp32_logits,
        params_dtype=torch_dtype, pipeline_dtype=torch_dtype, bf16=dtype == "bf16",
        fp16=dtype == "fp16", tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        sequence_parallel=sp and layout.tp > 1, calculate_per_token_loss=True,
        overlap_p2p_comm=interleaved, batch_p2p_comm=not interleaved,
        use_cpu_initialization=False, init_method=_leave_empty,
        output_layer_init_method=_leave_empty,
        gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, **recompute_args,
        **expert_args,
    )  # fmt: skip


def _leave_empty(weight: Tensor) -> Tensor:
    """Weights always come from a checkpoint: the strict loader proves that none is left out."""
    return weight


def build_model(
    role: str, arch: Architecture, groups: ParallelGroups, *, dtype: str = "fp32", sp: bool = False,
    recompute: str = "none", backend: str = "auto", attention: str = "auto",
    trainable: bool = False, window: int | None = None,
    fp32_logits: bool = True,
) -> ParallelModel:  # fmt: skip
    """Allocates this rank's part of a model; the weights are still to be loaded.

    Critic and reward models get a value head, the others vocabulary logits.

    Raises:
        ValueError: if the layout does not fit the architecture.
    """
    layout = groups.layout
    arch.check_layout(
        tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep, name=f"the {role} model"
    )
    config = transformer_config(
        arch, groups, dtype=dtype, sp=sp, recompute=recompute, attention=attention, window=window,
        fp32_logits=fp32_logits,
    )  # fmt: skip
    if backend == "auto":
        on_gpu = torch.cuda.is_available()
        backend = "te" if on_gpu and transformer_engine_available() else "local"
    head = "value" if role in ("critic", "reward") else "lm"
    chunks = []
    for stage in range(layout.vpp):
        chunk = RLModel(
            head=head, config=config,
            transformer_layer_spec=block_spec(
                arch.layers // (layout.pp * layout.vpp), qk_norm=arch.qk_norm, backend=backend,
                experts=arch.experts is not None,
            ),
            vocab_size=arch.padded_vocab(layout.tp), max_sequence_length=arch.max_positions,
            pre_process=groups.is_first_stage and stage == 0,
            post_process=groups.is_last_stage and stage == layout.vpp - 1,
            share_embeddings_and_output_weights=arch.tied and head == "lm",
            position_embedding_type="none", pg_collection=groups.collection(),
            vp_stage=stage if layout.vpp > 1 else None,
        )  # fmt: skip
        chunk.requires_grad_(trainable)
        chunk.train(trainable)
        chunks.append(chunk)
    cores = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CoreAttention)]
    for index, core in enumerate(cores):
        core.cache_layer = index
    return ParallelModel(role=role, arch=arch, groups=groups, config=config, chunks=chunks)

