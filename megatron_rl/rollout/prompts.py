"""Prompts from JSONL or Parquet files: checked once, read by position, resumed exactly.

The order of an epoch is a permutation drawn from (seed, epoch), so the position in the data is
three numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import ConfigError
from megatron_rl.rollout.records import Records, open_records
from megatron_rl.text import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the file.

    Attributes:
        index: number of the line or row, from 0.
        text: what a reward function sees as the prompt.
        token_ids: what the model gets.
        record: the whole row, as an object.
    """

    index: int
    text: str
    token_ids: list[int]
    record: dict[str, Any]


class PromptFile:
    """Random access to the prompts of a JSONL or Parquet file, or of several (see `open_records`).

    Args:
        limit: longest allowed prompt in tokens.

    Raises:
        ConfigError: for a missing or empty file, or naming the first row that can't be read, has no
            prompt or one of a wrong type, or is too long.
    """

    def __init__(
        self, path: str | Path, *, setting: str, prompt_key: str, chat_template: bool,
        tokenizer: Tokenizer, limit: int,
    ) -> None:  # fmt: skip
        self.path, self.setting, self.key = Path(path), setting, prompt_key
        self.chat_template, self.tokenizer, self.limit = chat_template, tokenizer, limit
        try:
            self._records: Records = open_records(self.path)
            for number, record in enumerate(self._records.scan(), start=1):
                self._check(record, number)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}", setting=setting) from error
        if not len(self):
            self._refuse(f"{path} has no prompts; write one JSON object per line, or one row each")
        self.fingerprint = self._records.fingerprint

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at `indices`, in that order; cheaper together than one by one."""
        prompts = []
        for index, record in zip(indices, self._records.read(indices), strict=True):
            text, token_ids = self._tokenise(record, index + 1)
            prompts.append(Prompt(index=index, text=text, token_ids=token_ids, record=record))
        return prompts

    def _check(self, record: dict[str, Any], number: int) -> None:
        prompt = record.get(self.key)
        if not prompt:
            lacks = "an empty" if self.key in record else "no"
            self._refuse(
                f"{self.path}, prompt {number} has {lacks} {self.key!r} (its keys: "
                f"{', '.join(map(repr, record))}); data.prompt_key names the key of the prompt"
            )
        is_chat = isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)
        if not isinstance(prompt, str) and not (self.chat_template and is_chat):
            expected = "a text, or a list of messages with data.chat_template=true"
            found = "a list of messages" if is_chat else f"of type {type(prompt).__name__}"
            self._refuse(
                f"{self.path}, prompt {number}: {self.key!r} is {found}; it must be {expected}"
            )
        # A token is at least one byte, so only prompts longer than the limit can be too long.
        if len(self._text(prompt).encode()) + 256 * self.chat_template > self.limit:
            self._tokenise(record, number)

    @staticmethod
    def _text(prompt: str | list[dict[str, Any]]) -> str:
        if isinstance(prompt, str):
            return prompt
        return json.dumps(prompt, ensure_ascii=False, default=str)

    def _tokenise(self, record: dict[str, Any], number: int) -> tuple[str, list[int]]:
        prompt = record[self.key]
        if self.chat_template:
            token_ids = self.tokenizer.encode_chat(as_conversation(prompt))
        else:
            token_ids = self.tokenizer.encode(prompt)
        if not 0 < len(token_ids) <= self.limit:
            self._refuse(
                f"{self.path}, prompt {number} has {len(token_ids)} tokens, allowed are 1 … "
                f"{self.limit} (data.max_prompt_length, the model's context and one new token); "
                "shorten or remove it"
            )
        return self._text(prompt), token_ids

    def _refuse(self, message: str) -> None:
        raise ConfigError(f"{self.setting}: {message}", setting=self.setting)


def as_conversation(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a prompt; a text is what the user says."""
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


class PromptStream:
    """An endless, resumable stream of prompts; every rank holds the same one."""

    def __init__(self, file: PromptFile, *, shuffle: bool, seed: int) -> None:
        self.file, self.shuffle, self.seed = file, shuffle, seed
        self.epoch = self.position = 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.file)))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self.file), generator=generator).tolist()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        indices: list[int] = []
        while len(indices) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            part = self._order[self.position : self.position + count - len(indices)]
            indices += part
            self.position += len(part)
        return self.file.read(indices)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "position": self.position, "seed": self.seed,
            "shuffle": self.shuffle, "fingerprint": self.file.fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the saved stream stopped.

        Raises:
            ConfigError: if the file, the seed or the order is another one than when saving.
        """
        for name, mine in (
            ("fingerprint", self.file.fingerprint), ("seed", self.seed), ("shuffle", self.shuffle)
        ):  # fmt: skip
            if state[name] != mine:
                raise ConfigError(
                    f"data.train: the prompts changed since the checkpoint ({name} was "
                    f"{state[name]}, is {mine}); restore them, or start anew with another "
                    "run_dir or checkpoint.resume=never",
                    setting="data.train",
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()
