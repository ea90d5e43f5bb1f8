"""The numerics of PPO, GRPO, RLOO and REINFORCE++ as pure functions on torch tensors.

Nothing here knows Megatron: process groups are arguments. Log-probs, ratios, KL, advantages and
values are fp32. Import from the module that defines the function:

* `logprobs`: log-probs and entropy on vocabulary shards; `truncation`: top-k / top-p on them;
  `vocab_kl`: exact KL on them; `vocab_shard`: the slice they work on
* `reward_shaping`: where a response ends, per-token rewards, penalties, filters
* `advantages`, `whitening`: estimators
* `losses`: policy, value and entropy loss, and the weights that make them sums
* `kl`: estimates of KL and the controllers of its coefficient
* `rollout_correction`: drift between generation and training, and importance weights
* `metrics`: adding up what the losses report
* `plugins`: a user's own estimator or loss
"""
