"""Settings of the reinforcement learning algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .schema import SECTION, section, setting

FUNCTION_FORM = (r"[^:]+:[A-Za-z_]\w*", "package.module:function or folder/file.py:function")

GROUP_ALGORITHMS = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Algorithms whose baseline comes from the other samples of the same prompt."""


@dataclass(**SECTION)
class AdaptiveKLSettings:
    """A KL coefficient that follows a target (Ziegler et al. 2019, section 2.2)."""

    enable: bool = setting(False)
    """Adapt the coefficient after every step, starting from algorithm.kl.coef."""
    target: float = setting(6.0, above=0)
    """KL per response, in nats, that the coefficient aims at."""
    horizon: int = setting(10000, at_least=1)
    """Samples over which the coefficient reacts; larger is slower."""


@dataclass(**SECTION)
class KLSettings:
    """The divergence from the reference model and what is done with it."""

    estimator: Literal["k1", "k2", "k3", "abs", "full"] = setting("k1")
    """Per token estimator: k1, k2, k3, |k1| (abs), or the whole distribution (full, as a loss)."""
    clamp: float = setting(10.0, above=0)
    """Bound on the magnitude of k3, which grows exponentially."""
    placement: Literal["none", "reward", "loss"] = setting("none")
    """Subtract the KL from the rewards, add it to the loss, or only log it."""
    coef: float = setting(0.0, at_least=0)
    """Weight of the KL in the reward or in the loss."""
    adaptive: AdaptiveKLSettings = section(AdaptiveKLSettings)
    """Adaptation of the coefficient."""


@dataclass(**SECTION)
class ImportanceSamplingSettings:
    """Correction for the difference between generation and training log-probs."""

    enable: bool = setting(False)
    """Weight each token by min(exp(training - generation log-prob), cap)."""
    cap: float = setting(2.0, above=0)
    """Upper bound of the weight (truncated importance sampling)."""
    sequence_mask_threshold: float | None = setting(None, above=1)
    """Drop sequences whose mean ratio lies outside 1/threshold … threshold; null drops none."""


@dataclass(**SECTION)
class OverlongSettings:
    """Soft punishment of responses near the length limit (DAPO, Yu et al. 2025, eq. 13)."""

    enable: bool = setting(False)
    """Shape the reward by the length of the response."""
    max_length: int | None = setting(None, at_least=1)
    """Response length in tokens at which the punishment is full; null: rollout.max_new_tokens."""
    buffer: int = setting(0, at_least=0)
    """Tokens before max_length over which the punishment grows linearly."""
    factor: float = setting(1.0, at_least=0)
    """Size of the full punishment."""
    filter: bool = setting(False)
    """Leave responses that were cut by the length limit out of the loss."""


@dataclass(**SECTION)
class DynamicSamplingSettings:
    """Generate until enough prompts have samples with different rewards (DAPO)."""

    enable: bool = setting(False)
    """Drop groups whose rewards are all equal and generate more."""
    max_batches: int = setting(10, at_least=1)
    """Generation batches after which a step gives up with an error."""


@dataclass(**SECTION)
class AlgorithmSettings:
    """Advantages, losses and their options."""

    name: Literal["ppo", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        setting("ppo")
    )
    """The algorithm. Only ppo has a critic; grpo, rloo and the baseline variant need n > 1."""
    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per token."""
    lam: float = setting(0.95, at_least=0, at_most=1)
    """GAE's lambda (ppo)."""
    lam_length_adaptive: bool = setting(False)
    """Use lambda = 1 - 1/(lam_length_constant * response length) instead of lam (ppo)."""
    lam_length_constant: float = setting(0.05, above=0)
    """The constant of the length-adaptive lambda."""
    clip_low: float = setting(0.2, at_least=0, below=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = setting(0.2, at_least=0)
    """The ratio is clipped above at 1 + clip_high (larger than clip_low: clip-higher)."""
    dual_clip: float | None = setting(None, above=1)
    """Bound on the loss of tokens with negative advantage, as a multiple of |A|; null: none."""
    value_clip: float | None = setting(0.2, above=0)
    """Range of the critic's values around the old ones; null: no clipping (ppo)."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"
    ] = setting("token_mean")
    """How token losses become one number; all use counts over the whole mini-batch."""
    loss_constant: float | None = setting(None, above=0)
    """Divisor of the summed token losses when loss_aggregation is constant."""
    whiten_advantages: bool = setting(True)
    """Whiten PPO's advantages over the batch. REINFORCE++ always does, grpo and rloo never do."""
    advantage_std: Literal["sample", "population", "none"] = setting("sample")
    """Standard deviation that grpo divides by within a group; none is Dr.GRPO."""
    missing_eos_penalty: float | None = setting(None, at_least=0)
    """Subtracted from the reward of a response without an end token; null: nothing."""
    critic_warmup_steps: int = setting(0, at_least=0)
    """First steps in which only the critic is trained."""
    overlong: OverlongSettings = section(OverlongSettings)
    """Length shaping."""
    dynamic_sampling: DynamicSamplingSettings = section(DynamicSamplingSettings)
    """Filtering of groups without a signal."""
    advantage_function: str | None = setting(None, form=FUNCTION_FORM)
    """Your own advantage estimator, as module:function; null uses that of the algorithm."""
    policy_loss_function: str | None = setting(None, form=FUNCTION_FORM)
    """Your own policy loss, as module:function; null uses the clipped ratio."""
    kl: KLSettings = section(KLSettings)
    """The KL divergence from the reference model."""
    importance_sampling: ImportanceSamplingSettings = section(ImportanceSamplingSettings)
    """Correction for the difference between generation and training log-probs."""

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.name == "ppo"

    @property
    def needs_groups(self) -> bool:
        """Whether several samples per prompt are required."""
        return self.name in GROUP_ALGORITHMS
