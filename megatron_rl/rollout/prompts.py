"""Prompts from a JSONL file: checked once, read by position, resumed exactly.

Only the byte offset of each line is held in memory. The order of an epoch is a permutation drawn
from (seed, epoch), so the position in the data is three numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import ConfigError
from megatron_rl.text import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One line of the file.

    Attributes:
        index: line number in the file, from 0.
        text: what a reward function sees as the prompt.
        token_ids: what the model gets.
        record: the whole JSON object.
    """

    index: int
    text: str
    token_ids: list[int]
    record: dict[str, Any]


class PromptFile:
    """Random access to the prompts of a JSONL file.

    Args:
        limit: longest allowed prompt in tokens.

    Raises:
        ConfigError: for a missing or empty file, or naming the first line that is not an object
            with the prompt key, is empty, or is too long.
    """

    def __init__(
        self, path: str | Path, *, setting: str, prompt_key: str, chat_template: bool,
        tokenizer: Tokenizer, limit: int,
    ) -> None:  # fmt: skip
        self.path, self.setting, self.key = Path(path), setting, prompt_key
        self.chat_template, self.tokenizer, self.limit = chat_template, tokenizer, limit
        self._offsets: list[int] = []
        digest = hashlib.sha256()
        for offset, line in self._lines():
            digest.update(line)
            number = len(self._offsets) + 1
            record = self._parse(line, number)
            # A token is at least one byte, so only lines longer than the limit can be too long.
            if len(line) + 256 * chat_template > limit:
                self._tokenise(record, number)
            self._offsets.append(offset)
        if not self._offsets:
            self._refuse(f"{path} has no prompts; write one JSON object per line")
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Prompt:
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            record = self._parse(file.readline(), index + 1)
        text, token_ids = self._tokenise(record, index + 1)
        return Prompt(index=index, text=text, token_ids=token_ids, record=record)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        if not self.path.is_file():
            self._refuse(f"there is no file {str(self.path)!r}; check the path")
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield offset, line
                offset += len(line)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            self._refuse(f"{self.path}, prompt {number} is not JSON ({error}); fix that line")
        if not isinstance(record, dict) or not record.get(self.key):
            self._refuse(
                f"{self.path}, prompt {number} has no {self.key!r}; each line must be an object "
                "with the key that data.prompt_key names"
            )
        return record

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
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        return text, token_ids

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
        prompts = []
        while len(prompts) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            prompts.append(self.file[self._order[self.position]])
            self.position += 1
        return prompts

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
