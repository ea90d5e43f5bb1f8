"""Takes secrets out of what a run writes about itself: environment, command, settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    # Not the tokens of a language model: eos_token, max_tokens, stop_token_ids, tokenizer.
    r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)token(?!iz|s\b|s_|_id)"
    r"|(api|access|private|secret|signing|encryption)_?key|(^|\.)key$|(?-i:_KEY$)"
    r"|secret|passw|passphrase|credential|cookie|authorization|\bauth\b|_auth\b|_pat\b",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
_URL_LOGIN = re.compile(r"(://)[^/\s@]+@")


def redact_text(text: str) -> str:
    """`text` without what looks like a token, a private key or the login of a URL."""
    return _URL_LOGIN.sub(rf"\1{REDACTED}@", _SECRET_VALUE.sub(REDACTED, text))


def redact(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested settings or of an environment without values that are secrets.

    A value is one if its name says so (`HF_TOKEN`, `api_key`, `reward.kwargs.password`) or if it
    looks like one itself.
    """
    return {name: _redact(str(name), value) for name, value in values.items()}


def redact_command(arguments: list[str]) -> list[str]:
    """A command line whose `name=value` arguments don't show secrets."""
    shown = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and value and _SECRET_NAME.search(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redact_text(argument))
    return shown


def _redact(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_redact(name, item) for item in value]
    if isinstance(value, str):
        return REDACTED if value and _SECRET_NAME.search(name) else redact_text(value)
    return value
