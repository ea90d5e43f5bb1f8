"""YAML as people read it: the 1.2 core types, and no silent surprises.

PyYAML follows YAML 1.1, where ``no`` is false, ``1e-5`` is text, ``010`` is eight, ``1:30`` is
ninety, and the second of two equal keys wins. Here only ``true`` and ``false`` are booleans,
numbers are decimal with or without an exponent, and duplicate keys, tabs as indentation, merge
keys and tags are errors that name the line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from .schema import ConfigError

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")}


class _Loader(yaml.SafeLoader):
    """SafeLoader that leaves every plain scalar to ``_scalar``."""

    yaml_implicit_resolvers: dict[str, Any] = {}


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML file and the line of each of its dotted keys (from 1).

    Raises:
        ConfigError: the file can't be read, is not UTF-8, or breaks a rule of this module.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: can't read the configuration: {reason}.") from error
    except UnicodeDecodeError as error:
        message = f"{path}: the configuration is not UTF-8 (byte {error.start}); save it as UTF-8."
        raise ConfigError(message) from error
    lines: dict[str, int] = {}
    value = parse_yaml(text, str(path), lines)
    if value is None:
        raise ConfigError(f"{path}: the configuration is empty; write at least model.actor.path.")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected `section:` lines at the top, found {value!r}.")
    return value, lines


def parse_yaml(text: str, source: str, lines: dict[str, int] | None = None) -> Any:
    """The value of one YAML document.

    Args:
        source: what errors call the text (a file name, or the override it came from).
        lines: filled with the line of each dotted key when given.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(f"{source}, line {number}: tab in the indentation; use spaces.")
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = error.problem or error.context
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}.") from error
    return None if node is None else _Values(source, lines).of(node, "", ())


class _Values:
    """Turns nodes into plain values and remembers the line of each dotted key."""

    def __init__(self, source: str, lines: dict[str, int] | None) -> None:
        self.source = source
        self.lines = {} if lines is None else lines

    def of(self, node: yaml.Node, prefix: str, parents: tuple[yaml.Node, ...]) -> Any:
        if any(node is parent for parent in parents):
            self._fail(node, "an alias contains itself; write the value out")
        inside = (*parents, node)
        if node.tag not in _PLAIN_TAGS:
            self._fail(node, f"tag {node.tag} is not supported; write a plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, prefix, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, f"{prefix}{i}.", inside) for i, item in enumerate(node.value)]
        return node.value if node.style else _plain_scalar(node.value)

    def _mapping(self, node: yaml.Node, prefix: str, inside: tuple[yaml.Node, ...]) -> Any:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fail(key_node, "a key must be plain text")
            key, dotted = key_node.value, f"{prefix}{key_node.value}"
            if key == "<<":
                self._fail(key_node, "merge keys (<<) are not supported; repeat the settings")
            if key in result:
                first = self.lines[dotted]
                self._fail(key_node, f"{dotted} is already set in line {first}; keep one of them")
            self.lines[dotted] = key_node.start_mark.line + 1
            result[key] = self.of(value_node, f"{dotted}.", inside)
        return result

    def _fail(self, node: yaml.Node, problem: str) -> None:
        raise ConfigError(f"{self.source}, line {node.start_mark.line + 1}: {problem}.")


def _plain_scalar(text: str) -> Any:
    """An unquoted scalar under the YAML 1.2 core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text
