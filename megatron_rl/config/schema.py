"""How a setting is declared, read from plain data, and checked.

Every section is a keyword-only frozen dataclass; a field is declared with ``setting`` (a value
with its allowed range) or ``section`` (a nested dataclass), and the string literal under it is its
help text. ``build`` turns nested dictionaries into such a dataclass, ``check_tree`` checks types
and ranges of an existing one. Both name a setting by its dotted key, as the user writes it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

SECTION = dict(kw_only=True, slots=True, frozen=True)
"""The dataclass options of every section: immutable, so no setting can change behind a reader."""


class ConfigError(ValueError):
    """A setting is wrong. The message names the setting, its value, the rule and the way out."""

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), setting=self.setting), self.args


def refuse(setting_name: str, value: object, rule: str, way_out: str) -> typing.NoReturn:
    """Raise the ConfigError ``setting = value: rule; way out.``"""
    end = "" if way_out.endswith("?") else "."
    message = f"{setting_name} = {in_yaml(value)}: {rule}; {way_out}{end}"
    raise ConfigError(message, setting=setting_name)


def in_yaml(value: object) -> str:
    """``value`` on one line the way a user would type it (None is null, True is true)."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if dataclasses.is_dataclass(value):
        return repr(to_plain(value))
    return repr(value)


def setting(default: Any, **limits: Any) -> Any:
    """A field with its allowed range.

    Limits: ``at_least``, ``above``, ``at_most``, ``below`` (numbers; for lists they hold for each
    item) and ``form=(regular expression, example)`` for strings.
    """
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=limits)
    return dataclasses.field(default=default, metadata=limits)


def section(cls: type, **values: Any) -> Any:
    """A field that holds a nested section, built with ``values`` where they are given."""
    return dataclasses.field(default_factory=lambda: cls(**values))


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved type of each field of a section class."""
    return typing.get_type_hints(cls)


def section_class(hint: Any) -> type | None:
    """The dataclass inside ``hint`` (``Section`` or ``Section | None``), if it is one."""
    return next((arm for arm in _arms(hint) if dataclasses.is_dataclass(arm)), None)


def leaf_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of all settings below ``cls``, sections left out."""
    for name, hint in hints(cls).items():
        nested = section_class(hint)
        if nested is None:
            yield prefix + name
        else:
            yield from leaf_keys(nested, f"{prefix}{name}.")


def nearest_key(root: type, wrong: str) -> str:
    """The real dotted key most like ``wrong``.

    A right name in the wrong place wins over a similar name: among those, the key that shares most
    sections with ``wrong``, then the one with fewest sections.
    """
    keys = list(leaf_keys(root))
    *sections, last = wrong.split(".")
    same_name = [key for key in keys if key.rsplit(".", 1)[-1] == last]

    def likeness(key: str) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, key, wrong).ratio()
        return ratio, len(os.path.commonprefix([key, wrong]))

    def place(key: str) -> tuple[int, int]:
        path = key.split(".")[:-1]
        return len(set(path) & set(sections)), -len(path)

    if same_name:
        return max(same_name, key=lambda key: (place(key), likeness(key)))
    return max(keys, key=likeness)


def build(cls: type, values: object, root: type, prefix: str = "") -> Any:
    """An instance of the section ``cls`` from nested plain data.

    Args:
        values: a mapping of field names; missing ones take their default.
        root: the class at the top, in which the nearest key to a misspelt one is looked up.
        prefix: the dotted key of this section followed by a dot, empty at the top.
    Raises:
        ConfigError: not a mapping, unknown key, or a value of the wrong type.
    """
    name_here = prefix.rstrip(".") or "the configuration"
    if not isinstance(values, Mapping):
        refuse(name_here, values, "is a section and needs `key: value` lines", "give a mapping")
    fields = hints(cls)
    arguments = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if name not in fields:
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                dotted = f"{dotted}.{inner}"
            near = nearest_key(root, dotted)
            refuse(dotted, value, "there is no such setting", f"the nearest one is {near}")
        nested = section_class(fields[name])
        if nested is None:
            arguments[name] = _number_from_text(value, fields[name])
            check_type(dotted, arguments[name], fields[name])
        elif value is None and type(None) in _arms(fields[name]):
            arguments[name] = None
        else:
            arguments[name] = build(nested, value, root, f"{dotted}.")
    defaults = {} if prefix == "" else _defaults_of(root, prefix)
    return cls(**{**defaults, **arguments})


def check_tree(instance: Any, prefix: str = "") -> None:
    """Check type and range of every setting of ``instance`` and of its nested sections."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        dotted = f"{prefix}{field.name}"
        check_type(dotted, value, hints(type(instance))[field.name])
        if dataclasses.is_dataclass(value):
            check_tree(value, f"{dotted}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                _check_range(dotted, item, field.metadata)


def check_type(dotted: str, value: object, hint: Any) -> None:
    """Raise ConfigError unless ``value`` is of the type ``hint``; floats must be finite."""
    if any(_is_a(value, arm) for arm in _arms(hint)):
        return
    refuse(dotted, value, f"must be {_in_words(hint)}", _way_out(value, hint))


def changed(settings: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each setting that differs between two instances of a section."""
    for field in dataclasses.fields(settings):
        value, usual = getattr(settings, field.name), getattr(default, field.name)
        if value == usual:
            continue
        if dataclasses.is_dataclass(value) and dataclasses.is_dataclass(usual):
            yield from changed(value, usual, f"{prefix}.{field.name}")
        else:
            yield f"{prefix}.{field.name}", value


def refuse_idle_options(settings: Any, prefix: str, *, independent: str = "") -> None:
    """Refuse options of a feature whose ``enable`` is false: they would be ignored in silence.

    Args:
        independent: an option that works without ``enable``.
    """
    if settings.enable:
        return
    for dotted, value in changed(settings, type(settings)(), prefix):
        if dotted != f"{prefix}.{independent}":
            rule = f"has no effect while {prefix}.enable is false"
            refuse(dotted, value, rule, f"set {prefix}.enable=true or remove it")


def to_plain(instance: Any) -> dict[str, Any]:
    """The section as nested dictionaries and lists."""
    return dataclasses.asdict(instance)


def _defaults_of(root: type, prefix: str) -> dict[str, Any]:
    """Values a parent gives a nested section (the critic's learning rate is not the actor's)."""
    parent: type = root
    *path, last = prefix.rstrip(".").split(".")
    for name in path:
        parent = section_class(hints(parent)[name]) or parent
    field = next(f for f in dataclasses.fields(parent) if f.name == last)
    if field.default_factory is dataclasses.MISSING:
        return {}
    default = field.default_factory()
    return {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}


def _arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_a(value: object, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        # 0 == False in Python, and a setting that takes false must not take 0.
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _number_from_text(value: object, hint: Any) -> object:
    """A quoted or whole number is a number where a float is expected."""
    if float not in _arms(hint) or isinstance(value, bool) or not isinstance(value, int | str):
        return value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value  # check_type says what is wrong with it


def _check_range(dotted: str, value: Any, limits: Mapping[str, Any]) -> None:
    tests = {
        "at_least": (lambda v, bound: v >= bound, "must be at least"),
        "above": (lambda v, bound: v > bound, "must be greater than"),
        "at_most": (lambda v, bound: v <= bound, "must be at most"),
        "below": (lambda v, bound: v < bound, "must be less than"),
    }
    for name, (holds, words) in tests.items():
        if name in limits and not holds(value, limits[name]):
            span = _span_in_words(limits)
            refuse(dotted, value, f"{words} {limits[name]}", f"choose a value {span}")
    if "form" in limits:
        pattern, example = limits["form"]
        if not re.fullmatch(pattern, value):
            refuse(dotted, value, "does not have the expected form", f"write it like {example}")


def _span_in_words(limits: Mapping[str, Any]) -> str:
    signs = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}
    return " and ".join(f"{signs[name]} {limits[name]}" for name in signs if name in limits)


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    words[type(None)] = "null"
    parts = []
    for arm in _arms(hint):
        origin, args = typing.get_origin(arm), typing.get_args(arm)
        if origin is Literal:
            parts += [str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args]
        elif origin is list:
            parts.append(f"a list whose items are each {_in_words(args[0])}")
        elif origin is dict:
            parts.append("a mapping with text keys")
        else:
            parts.append(words.get(arm, "a section of `key: value` lines"))
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _way_out(value: object, hint: Any) -> str:
    """The likeliest repair for a value of the wrong type."""
    arms = _arms(hint)
    literals = [arm for arm in arms if typing.get_origin(arm) is Literal]
    if literals and isinstance(value, str):
        choices = [arg for arg in typing.get_args(literals[0]) if isinstance(arg, str)]
        near = difflib.get_close_matches(value, choices, n=1)
        if near:
            return f"did you mean {near[0]}?"
    if bool in arms and isinstance(value, str):
        return "write true or false without quotes"
    if int in arms and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if str in arms and isinstance(value, int | float):
        return f"put it in quotes, as in '{value}'"
    if any(typing.get_origin(arm) is list for arm in arms):
        return "write a list, as in [a, b]"
    return f"give {_in_words(hint)}"
