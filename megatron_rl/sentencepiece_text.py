"""A SentencePiece model file as the tokenizer of a run."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.model import TokenizerSettings
from megatron_rl.text import all_end_ids, first_line


class SentencePieceTokenizer:
    """A `Tokenizer` from a SentencePiece model file.

    Where the text holds the name of a special piece (`</s>`), that piece's id stands in the ids;
    what lies between two of them is encoded as a text of its own.

    Args:
        place: the file, or a folder with a `tokenizer.model`.
        settings: names the special pieces; those it leaves out are the file's own.

    Raises:
        ConfigError: there is no such file, it is not a SentencePiece model, or a special piece is
            not in it.
    """

    def __init__(self, place: str | Path, settings: TokenizerSettings) -> None:
        path = Path(place) / "tokenizer.model" if Path(place).is_dir() else Path(place)
        self._model = _load_sentencepiece(path)
        specials = {
            name: _special_id(self._model, name, getattr(settings, f"{name}_token"), path)
            for name in ("bos", "eos", "pad")
        }
        if specials["eos"] is None:
            raise ConfigError(
                f"model.tokenizer.eos_token is null and {path} has no piece that ends a text; "
                "name one of its pieces",
                setting="model.tokenizer.eos_token",
            )
        ids = {i for i in specials.values() if i is not None}
        self._special_ids = {self._model.id_to_piece(i): i for i in ids}
        names = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._bos_id = specials["bos"]
        self.end_ids = all_end_ids(specials["eos"], path.parent)
        self.chat_template: str | None = None

    def __len__(self) -> int:
        return self._model.get_piece_size()

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        ids = [self._bos_id] if special_tokens and self._bos_id is not None else []
        for part in self._special.split(text):
            special = self._special_ids.get(part)
            ids += self._model.encode(part) if special is None else [special]
        return ids

    def encode_chat(self, messages: list[dict[str, Any]], *, answered: bool = False) -> list[int]:
        raise ConfigError(
            "data.chat_template is true, but a SentencePiece file holds no chat template; write "
            "the template's text into the prompts",
            setting="data.chat_template",
        )

    def decode(self, ids: list[int]) -> str:
        # A model may have rows beyond the tokenizer's pieces, and sample them.
        skipped, size = set(self._special_ids.values()), len(self)
        return self._model.decode([i for i in ids if i < size and i not in skipped])

    def fingerprint(self) -> str:
        specials = repr(sorted(self._special_ids.items())).encode()
        return hashlib.sha256(self._model.serialized_model_proto() + specials).hexdigest()


def _load_sentencepiece(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    if not path.is_file():
        raise ConfigError(
            f"model.tokenizer.path: there is no file {str(path)!r}; give a SentencePiece model "
            "file or a folder with a tokenizer.model",
            setting="model.tokenizer.path",
        )
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"model.tokenizer.path: {str(path)!r} is not a SentencePiece model "
            f"({first_line(error)}); fetch it again or name another",
            setting="model.tokenizer.path",
        ) from error
    return model


def _special_id(model: Any, name: str, piece: str | None, path: Path) -> int | None:
    """The id of a special piece: the one named in the settings, else the file's, else None."""
    own = getattr(model, f"{name}_id")()
    if piece is None:
        return own if own >= 0 else None
    found = model.piece_to_id(piece)
    if model.id_to_piece(found) == piece:
        return found
    control = [model.id_to_piece(i) for i in range(len(model)) if model.is_control(i)]
    raise ConfigError(
        f"model.tokenizer.{name}_token is {piece!r}: {path} has no such piece; its control pieces "
        f"are {', '.join(control[:8]) or 'none'}",
        setting=f"model.tokenizer.{name}_token",
    )
