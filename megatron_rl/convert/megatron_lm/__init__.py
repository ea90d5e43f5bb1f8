"""Megatron-LM's checkpoint folders: read as a model of any role, and written."""

from megatron_rl.convert.megatron_lm.folder import MegatronLMFolder
from megatron_rl.convert.megatron_lm.locate import is_megatron_lm
from megatron_rl.convert.megatron_lm.plan import MegatronLMPlan

__all__ = ["MegatronLMFolder", "MegatronLMPlan", "is_megatron_lm"]
