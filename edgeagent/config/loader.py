"""YAML text to Config: unknown keys, wrong types and impossible values with their lines, all at once."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from edgeagent.config.schema import Config
from edgeagent.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32

T = typing.TypeVar("T")

_SIZE = re.compile(r"^\s*(\d+)\s*(MiB|Mi|GiB|Gi|M|G|MB|GB)\s*$")


def camel(name: str) -> str:
    """`poll_seconds` -> `pollSeconds`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def parse_size_mib(text: str) -> int | None:
    """'8GiB' or '8Gi' -> 8192, '500MiB' -> 500; None for anything else (decimal units included)."""
    m = _SIZE.match(text)
    if not m or m.group(2) not in ("MiB", "Mi", "GiB", "Gi"):
        return None
    return int(m.group(1)) * (1024 if m.group(2).startswith("G") else 1)


class _Loader:
    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.problems: list[str] = []

    def problem(self, node: yaml.Node | None, path: str, text: str) -> None:
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        self.problems.append(f"{self.filename}{line}: {path + ': ' if path else ''}{text}")

    # -- dispatch ---------------------------------------------------------------------------------

    def value(self, node: yaml.Node, annotation: Any, path: str, metadata: Any, depth: int) -> Any:
        """The Python value of `node` for `annotation`; reports problems and then returns None."""
        if depth > MAX_DEPTH:
            self.problem(node, path, "nested too deeply")
            return None
        origin = typing.get_origin(annotation)
        args = typing.get_args(annotation)
        if origin in (types.UnionType, typing.Union):
            if _is_null(node):
                return None
            (annotation,) = [a for a in args if a is not type(None)]
            return self.value(node, annotation, path, metadata, depth)
        if is_dataclass(annotation):
            return self.section(node, typing.cast(type, annotation), path, depth)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                self.problem(node, path, f"must be a list, not {_shown(node)}")
                return None
            return tuple(
                self.value(item, args[0], f"{path}[{i}]", metadata, depth + 1)
                for i, item in enumerate(node.value)
            )
        if origin is dict:
            if not isinstance(node, yaml.MappingNode):
                self.problem(node, path, f"must be a mapping, not {_shown(node)}")
                return None
            out: dict[str, Any] = {}
            for k, v in node.value:
                if not isinstance(k, yaml.ScalarNode):
                    self.problem(k, path, "a key must be a plain value")
                    continue
                if k.value in out:
                    self.problem(k, f"{path}.{k.value}", "given twice")
                out[k.value] = self.value(v, args[1], f"{path}.{k.value}", metadata, depth + 1)
            return out
        if annotation is Any:
            return None if _is_null(node) else getattr(node, "value", None)
        return self.scalar(node, annotation, path, metadata)

    def scalar(self, node: yaml.Node, annotation: type, path: str, metadata: Any) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            self.problem(node, path, f"must be {_type_name(annotation)}, not {_shown(node)}")
            return None
        value: Any
        tag = node.tag.rpartition(":")[2]
        text = node.value
        if annotation is bool:
            if tag != "bool":
                self.problem(node, path, f"must be true or false, not {text!r}")
                return None
            return text.lower() in ("true", "yes", "on")
        if annotation in (int, float):
            value = self.number(node, annotation, tag, text, path)
            if value is None:
                return None
            low, high = metadata.get("low"), metadata.get("high")
            if (low is not None and value < low) or (high is not None and value > high):
                bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
                self.problem(node, path, f"{text} is out of range: must be {bounds}")
                return None
            return value
        if tag == "null":
            self.problem(node, path, "must be text, not empty")
            return None
        if tag in ("bool",) and metadata.get("choices"):
            # YAML 1.1 reads a bare off/on/no as a boolean; for a key with choices the word is meant.
            text = {"false": "off", "true": "on"}.get(text.lower(), text.lower())
        choices, pattern = metadata.get("choices"), metadata.get("pattern")
        if choices and text not in choices:
            close = difflib.get_close_matches(text, choices, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.problem(node, path, f"{text!r} must be one of {', '.join(choices)}{hint}")
            return None
        if pattern and not re.search(pattern, text):
            right = metadata.get("form") or f"something like {pattern}"
            self.problem(node, path, f"{text!r} does not have the right form: must be {right}")
            return None
        if "\x00" in text:
            self.problem(node, path, "must not contain a NUL character")
            return None
        return text

    def number(self, node: yaml.Node, annotation: type, tag: str, text: str, path: str) -> int | float | None:
        mib = parse_size_mib(text)
        if mib is not None and path.endswith("MiB"):
            self.problem(node, path, f"{text!r}: the unit is in the key's name; write {mib}")
            return None
        if mib is not None or re.match(r"^\d+\s*[A-Za-z]+$", text):
            self.problem(node, path, f"must be a plain number, not {text!r}; the unit is in the key's name")
            return None
        if tag not in ("int", "float") or (annotation is int and tag == "float"):
            self.problem(node, path, f"must be {_type_name(annotation)}, not {text!r}")
            return None
        try:
            value = yaml.safe_load(text)
            number = int(value) if annotation is int else float(value)
        except (ValueError, TypeError, OverflowError, yaml.YAMLError):
            self.problem(node, path, f"must be {_type_name(annotation)}, not {text!r}")
            return None
        if number != number or number in (float("inf"), float("-inf")):
            self.problem(node, path, "must be finite")
            return None
        return number

    def section(self, node: yaml.Node, cls: type, path: str, depth: int) -> Any:
        shorthand = getattr(cls, "shorthand", None)
        keys = {f.metadata.get("yaml") or camel(f.name): f for f in fields(cls)}
        hints = typing.get_type_hints(cls)
        if isinstance(node, yaml.ScalarNode) and shorthand and not _is_null(node):
            names = shorthand.split(",")
            given = {
                n: self.value(
                    node,
                    hints[n],
                    f"{path}.{n}",
                    next(f for f in fields(cls) if f.name == n).metadata,
                    depth + 1,
                )
                for n in names
            }
            return None if None in given.values() else cls(**given)
        if _is_null(node):
            return cls()
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, path, f"must be a mapping, not {_shown(node)}")
            return None
        before = len(self.problems)
        values: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for k, v in node.value:
            if not isinstance(k, yaml.ScalarNode):
                self.problem(k, path, "a key must be a plain word")
                continue
            here = f"{path}.{k.value}" if path else k.value
            if k.value in seen:
                self.problem(k, here, f"given twice (first in line {seen[k.value]})")
                continue
            seen[k.value] = k.start_mark.line + 1
            f = keys.get(k.value)
            if f is None:
                close = difflib.get_close_matches(k.value, list(keys), 1, 0.6)
                hint = (
                    f" (did you mean {close[0]}?)" if close else f" (known here: {', '.join(sorted(keys))})"
                )
                self.problem(k, here, f"unknown key{hint}")
                continue
            optional = type(None) in typing.get_args(hints[f.name])
            if _is_null(v) and not optional and not is_dataclass(hints[f.name]):
                continue  # `key:` with nothing after it: the default
            values[f.name] = self.value(v, hints[f.name], here, f.metadata, depth + 1)
        if len(self.problems) > before:
            return None
        made = cls(**values)
        self.check(made, node, path, skip=set(values))
        return made

    def check(self, made: Any, node: yaml.Node, path: str, skip: set[str]) -> None:
        """Reports what a section finds wrong with itself; sections left out of the file too."""
        check = getattr(made, "check", None)
        for text in check() if check else []:
            self.problem(node, path, text)
        for f in fields(made):
            if f.name not in skip and is_dataclass(getattr(made, f.name)):
                name = f.metadata.get("yaml") or camel(f.name)
                self.check(getattr(made, f.name), node, f"{path}.{name}" if path else name, skip=set())


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")


def _type_name(annotation: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
        annotation, "a value"
    )


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return repr(node.value)


def load_text(text: str, filename: str = "config") -> Config:
    """Parses YAML text. Raises ConfigError with every problem, each as `file:line: key: sentence`."""
    return load_as(Config, text, filename)


def load_as(cls: type[T], text: str, filename: str) -> T:
    """YAML text as any dataclass whose fields are `key(...)`; else as load_text."""
    loader = _Loader(filename)
    for number, line in enumerate(text.splitlines(), 1):
        if line[: len(line) - len(line.lstrip())].count("\t"):
            loader.problems.append(f"{filename}:{number}: tab in the indentation: use spaces")
    if loader.problems:
        raise ConfigError(loader.problems)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{filename}{line}: not valid YAML: {e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{filename}: not valid YAML: {str(e).splitlines()[0]}") from e
    if node is None:
        return cls()
    made = loader.section(node, cls, "", 0)
    if loader.problems:
        raise ConfigError(loader.problems)
    assert isinstance(made, cls)
    return made


def load_file(path: str | Path) -> Config:
    """Reads and parses a file. Raises ConfigError."""
    return load_text(read_file(path), str(path))


def read_file(path: str | Path) -> str:
    """A YAML file's text. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot read: {e.strerror or e}") from e
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start})") from e
    return text


def to_plain(value: Any) -> Any:
    """A Config (or part of one) as plain dicts, lists and scalars with the YAML's key names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.metadata.get("yaml") or camel(f.name): to_plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    return value
