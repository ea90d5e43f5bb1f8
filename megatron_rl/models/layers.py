"""The transformer layer: Megatron's parallel linear layers around our attention and norm.

One spec for every family. Transformer Engine's linear layers and norms take the place of Megatron's
own when `transformer_engine` imports and the configuration asks for them; attention stays ours.
"""

from __future__ import annotations

import importlib.util

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_rl.models.attention import CoreAttention
from megatron_rl.models.experts import ExpertTransformerLayer


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019), fp32 inside, right under sequence parallel.

    Its weight is marked so that Megatron sums its gradient over the TP ranks when each of them sees
    only its slice of the sequence.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class GroupedSelfAttention(SelfAttention):
    """Self-attention that also works on its own TP group when there are fewer KV heads than ranks.

    Megatron assembles the cut query/key/value groups by an all-gather over its *global* TP group;
    here the model's own group is used.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states=None, output_gate=False, split_qkv=True
    ):
        groups = self.config.num_query_groups
        if groups >= self.world_size:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=output_gate, split_qkv=split_qkv
            )
        assert split_qkv and not output_gate, "not used by the families of this project"
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
        ranks_per_group = self.world_size // groups
        group, part = divmod(self.pg_collection.tp.rank(), ranks_per_group)
        head_dim = self.hidden_size_per_attention_head
        size = mixed.shape[-1] // groups
        own = mixed[..., group * size : (group + 1) * size]
        q, k, v = torch.split(own, [size - 2 * head_dim, head_dim, head_dim], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
        heads = q.shape[-2] // ranks_per_group
        q = q[..., part * heads : (part + 1) * heads, :]
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v


def transformer_engine_available() -> bool:
    """True when Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def layer_spec(*, qk_norm: bool, backend: str, experts: bool = False) -> tuple[ModuleSpec, type]:
    """The layer and the final norm for `backend`: "local" (Megatron's linear layers) or "te".

    Args:
        experts: a mixture of experts is in the place of the feed-forward layer.

    Raises:
        ValueError: if Transformer Engine is asked for and missing.
    """
    column, row, norm = ColumnParallelLinear, RowParallelLinear, RMSNorm
    if backend == "te":
        if not transformer_engine_available():
            raise ValueError(
                "model.layer_spec is 'te' but transformer_engine can't be imported; "
                "install it (pip install 'megatron-rl[te]') or set model.layer_spec=local"
            )
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TENorm,
            TERowParallelLinear,
        )

        column, row, norm = TEColumnParallelLinear, TERowParallelLinear, TENorm
    attention = ModuleSpec(
        module=GroupedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=CoreAttention, linear_proj=row,
            q_layernorm=norm if qk_norm else None, k_layernorm=norm if qk_norm else None,
        ),
    )  # fmt: skip
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    layer = ModuleSpec(
        module=ExpertTransformerLayer if experts else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm, mlp_bda=get_bias_dropout_add,
            cross_attention=IdentityOp,
            mlp=IdentityOp if experts else mlp,
        ),
    )  # fmt: skip
    return layer, norm


def block_spec(
    layers: int, *, qk_norm: bool, backend: str, experts: bool = False
) -> TransformerBlockSubmodules:
    """`layers` equal layers and a final norm; see `layer_spec`."""
    layer, norm = layer_spec(qk_norm=qk_norm, backend=backend, experts=experts)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
