"""A learned reward model: one scalar per sample, read at the last real token.

The model is a frozen Megatron model of the run, cut like the others. It reads the actor's own
token ids where its tokenizer gives the same ones, and otherwise the decoded text, encoded anew with
its own tokenizer and chat template.

Which token is the last real one is transformers' rule for sequence classifiers: the rightmost that
is not the model's `pad_token_id`. A model whose pad token is its end token is therefore read at the
last token before the end; any other is read at the end token, if the response has one.

Shapes: B samples of this replica.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import Config, ConfigError
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.engine.microbatch import MicroBatch, pack, partition
from megatron_rl.engine.passes import share_from_last_stage
from megatron_rl.engine.schedule import forward_only
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.prompts import as_conversation
from megatron_rl.text import Tokenizer, load_tokenizer

SETTING = "model.reward.path"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReader:
    """How a learned reward model reads a sample.

    Attributes:
        tokenizer: the model's own, which encodes decoded text; None: the actor's ids are read.
        chat_key: where a record holds the conversation that the response answers; None: prompts
            are plain text.
        pad_id: the model's `pad_token_id`, never read as the last token; None: there is none.
        max_positions: longest sample in tokens.
    """

    tokenizer: Tokenizer | None
    chat_key: str | None
    pad_id: int | None
    max_positions: int

    def sequences(self, batch: RolloutBatch) -> list[Tensor]:
        """Token ids of every sample, int64 `[length]`, ending at the last real token.

        Raises:
            ValueError: for a sample that is longer than the model's context.
        """
        sequences = [self._until_last_real(ids) for ids in self._token_ids(batch)]
        longest = max(len(s) for s in sequences)
        if longest > self.max_positions:
            raise ValueError(
                f"{SETTING}: a sample has {longest} tokens for the reward model, whose context is "
                f"{self.max_positions}; lower rollout.max_length"
            )
        return sequences

    def _token_ids(self, batch: RolloutBatch) -> list[Tensor]:
        if self.tokenizer is None:
            return batch.sequences
        encoded = []
        for prompt, text in zip(batch.prompts, batch.texts, strict=True):
            if self.chat_key is not None:
                messages = as_conversation(prompt.record[self.chat_key])
                answer = {"role": "assistant", "content": text}
                ids = self.tokenizer.encode_chat([*messages, answer], answered=True)
            else:
                ids = self.tokenizer.encode(prompt.text + text, special_tokens=True)
            encoded.append(torch.tensor(ids))
        return encoded

    def _until_last_real(self, ids: Tensor) -> Tensor:
        if self.pad_id is None:
            return ids
        real = (ids != self.pad_id).nonzero()
        return ids[: int(real[-1]) + 1] if len(real) else ids[:1]


def learned_scores(
    batch: RolloutBatch, model: ParallelModel, reader: SampleReader, config: Config
) -> Tensor:
    """The reward model's score of every sample, fp32 `[B]`, equal on all ranks of the replica."""
    return scores_of(reader.sequences(batch), model, config) if len(batch) else torch.zeros(0)


def scores_of(sequences: list[Tensor], model: ParallelModel, config: Config) -> Tensor:
    """The score at the last token of each sequence (`SampleReader.sequences`), fp32 `[B]`."""
    training = config.training
    parts = partition(
        [len(s) for s in sequences], micro_batch_size=training.micro_batch_size,
        max_tokens=training.max_tokens_per_micro_batch,
    )  # fmt: skip
    micro_batches = [
        pack(
            [sequences[i] for i in part], [1] * len(part), model=model, rows="last", samples=part
        )
        for part in parts
    ]  # fmt: skip

    def head(scores_N: Tensor, micro: MicroBatch) -> tuple[list[int], Tensor]:
        return micro.samples, scores_N

    scores_B = torch.zeros(len(sequences))
    for samples, scores_N in forward_only(model, micro_batches, head):
        scores_B[samples] = scores_N.float().cpu()
    return share_from_last_stage(scores_B, model.groups)


def check_reward_model(
    config: Config, model: ModelFolder, actor_tokenizer: Tokenizer
) -> SampleReader:
    """Checks the tokenizer beside a reward model, and decides how samples are read.

    Raises:
        ConfigError: for a tokenizer that does not fit, or samples that may be longer than the
            model's context.
    """
    arch = model.architecture
    try:
        tokenizer = _own_tokenizer(model, config, actor_tokenizer)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{SETTING}: {error}", setting=SETTING) from error
    reader = SampleReader(
        tokenizer=tokenizer, max_positions=arch.max_positions,
        chat_key=config.data.prompt_key if config.data.chat_template else None,
        pad_id=_pad_id(model),
    )  # fmt: skip
    longest = config.rollout.longest_sequence(config.data.max_prompt_length)
    if tokenizer is None and longest is not None and longest > arch.max_positions:
        raise ConfigError(
            f"{SETTING}: the reward model reads at most {arch.max_positions} tokens, but a prompt "
            f"and its response may have {longest}; lower rollout.max_length",
            setting=SETTING,
        )
    return reader


def _pad_id(model: ModelFolder) -> int | None:
    path = model.companions().get("config.json")
    return json.loads(path.read_text()).get("pad_token_id") if path else None


def _own_tokenizer(model: ModelFolder, config: Config, actor: Tokenizer) -> Tokenizer | None:
    """The folder's tokenizer where it reads samples differently from the actor's, else None."""
    own, settings = None, config.model.tokenizer
    folder, arch = model.companion_folder, model.architecture
    if any(folder.glob("tokenizer.model" if settings.type == "sentencepiece" else "tokenizer*")):
        own = load_tokenizer(folder, settings, trust_remote_code=config.model.trust_remote_code)
    tokenizer = own or actor
    if len(tokenizer) > arch.vocab:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the vocabulary of the reward model in "
            f"{str(folder)!r} has {arch.vocab}; put the model's own tokenizer into its folder"
        )
    if own is None:
        return None
    chat, same_ids = config.data.chat_template, own.fingerprint() == actor.fingerprint()
    if same_ids and (not chat or own.chat_template in (None, actor.chat_template)):
        return None
    if chat and own.chat_template is None:
        raise ValueError(
            f"the tokenizer in {str(folder)!r} is another one than the actor's and has no chat "
            "template, which data.chat_template asks for; add one, or set data.chat_template=false"
        )
    return own
