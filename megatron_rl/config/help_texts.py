"""The help text of every setting: the string literal under its field in the source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import yaml

from .schema import hints, section_class


@functools.cache
def help_texts(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows it, for the fields that ``cls`` has."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for node, after in zip(body, body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and is_text:
                texts[node.target.id] = inspect.cleandoc(after.value.value)
    return texts


def annotated_yaml(values: dict[str, Any], cls: type, dumper: type, indent: str = "") -> str:
    """``values`` of the section ``cls`` as YAML with each setting's help text above it."""
    parts = []
    for name, value in values.items():
        text = f"{indent}# {help_texts(cls)[name]}\n"
        nested = section_class(hints(cls)[name])
        if nested is not None and value is not None:
            inside = annotated_yaml(value, nested, dumper, indent + "  ")
            parts.append(f"{text}{indent}{name}:\n{inside}")
        else:
            line = yaml.dump({name: value}, Dumper=dumper, sort_keys=False, allow_unicode=True)
            parts.append(text + textwrap.indent(line, indent))
        if not indent:
            parts.append("\n")
    return "".join(parts)
