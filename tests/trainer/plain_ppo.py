"""PPO with transformers and torch alone, in float64: what the trainer is compared with.

Written from the papers (Schulman et al. 2017 for the clipped losses, 2016 for GAE), one sequence at
a time, with no code of the package.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor


class PlainPPO:
    """Actor, critic (the actor's trunk with a scalar head) and frozen reference."""

    def __init__(self, folder: str, *, lr: float, eps: float, kl_coef: float, gamma: float = 1.0,
                 lam: float = 0.95, clip: float = 0.2, value_clip: float = 0.2,
                 clip_grad: float = 1.0) -> None:  # fmt: skip
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.actor = load(folder, dtype=torch.float64)
        self.reference = load(folder, dtype=torch.float64)
        self.critic = load(folder, dtype=torch.float64).model
        hidden = self.actor.config.hidden_size
        self.head = torch.nn.Linear(hidden, 1).double()
        torch.nn.init.zeros_(self.head.weight)
        self.fresh_head = True
        self.gradients: dict[str, list[dict[str, Tensor]]] = {"policy": [], "value": []}
        self.kl_coef, self.gamma, self.lam = kl_coef, gamma, lam
        self.clip, self.value_clip, self.clip_grad = clip, value_clip, clip_grad
        adam = dict(lr=lr, eps=eps, betas=(0.9, 0.95), weight_decay=0.0)
        self.actor_optimizer = torch.optim.AdamW(self.actor.parameters(), **adam)
        self.critic_parameters = [*self.critic.parameters(), *self.head.parameters()]
        self.critic_optimizer = torch.optim.AdamW(self.critic_parameters, **adam)

    def _critic_names(self) -> dict[str, Tensor]:
        """The critic's parameters under the names of a Hugging Face folder with a score head."""
        head = {"score.weight": self.head.weight, "score.bias": self.head.bias}
        return dict(self.critic.named_parameters(prefix="model")) | head

    def logprobs(self, model, tokens: Tensor, prompt: int) -> Tensor:
        logits = model(tokens[None]).logits[0, prompt - 1 : -1]
        return logits.log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1)

    def values(self, tokens: Tensor, prompt: int) -> Tensor:
        """Values before each response token, and after the last."""
        hidden = self.critic(tokens[None]).last_hidden_state[0, prompt - 1 :]
        return self.head(hidden).squeeze(1)

    def step(self, samples: list[dict], mini_batches: list[list[int]], epochs: int) -> dict:
        """Samples: `tokens`, `prompt` (its length), `score`, `finished`."""
        if self.fresh_head:
            mean = sum(s["score"] for s in samples) / len(samples)
            torch.nn.init.constant_(self.head.bias, mean)
            self.fresh_head = False
        with torch.no_grad():
            data = [self._targets(s) for s in samples]
        flat = torch.cat([d["advantages"] for d in data])
        mean, std = flat.mean(), flat.std()
        for d in data:
            d["advantages"] = (d["advantages"] - mean) / (std + 1e-8)
        losses = {"policy": [], "value": []}
        for name, loss, optimizer, named in (
            ("value", self._value_loss, self.critic_optimizer, self._critic_names()),
            ("policy", self._policy_loss, self.actor_optimizer,
             dict(self.actor.named_parameters())),
        ):
            parameters = list(named.values())
            for _ in range(epochs):
                for chosen in mini_batches:
                    tokens = sum(len(data[i]["old"]) for i in chosen)
                    total = sum(loss(samples[i], data[i]).sum() for i in chosen) / tokens
                    optimizer.zero_grad()
                    total.backward()
                    self.gradients[name].append({n: p.grad.clone() for n, p in named.items()})
                    torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad)
                    optimizer.step()
                    losses[name].append(total.item())
        return {name: sum(values) / len(values) for name, values in losses.items()}

    def _targets(self, sample: dict) -> dict[str, Tensor]:
        tokens, prompt = sample["tokens"], sample["prompt"]
        old = self.logprobs(self.actor, tokens, prompt)
        rewards = -self.kl_coef * (old - self.logprobs(self.reference, tokens, prompt))
        rewards[-1] += sample["score"]
        values = self.values(tokens, prompt)
        following = values[1:].clone()
        if sample["finished"]:
            following[-1] = 0.0
        values = values[:-1]
        advantages, carry = torch.zeros_like(values), 0.0
        for t in reversed(range(len(values))):
            delta = rewards[t] + self.gamma * following[t] - values[t]
            carry = delta + self.gamma * self.lam * carry
            advantages[t] = carry
        return {"old": old, "values": values, "advantages": advantages,
                "returns": advantages + values}  # fmt: skip

    def _policy_loss(self, sample: dict, data: dict) -> Tensor:
        ratio = (self.logprobs(self.actor, sample["tokens"], sample["prompt"]) - data["old"]).exp()
        a = data["advantages"]
        return torch.maximum(-a * ratio, -a * ratio.clamp(1 - self.clip, 1 + self.clip))

    def _value_loss(self, sample: dict, data: dict) -> Tensor:
        values = self.values(sample["tokens"], sample["prompt"])[:-1]
        near = data["values"] + (values - data["values"]).clamp(-self.value_clip, self.value_clip)
        errors = ((values - data["returns"]) ** 2, (near - data["returns"]) ** 2)
        return 0.5 * torch.maximum(*errors)
