"""Writes docs/configuration.md from the schema, so that the page cannot drift from the code.

`python tools/make_config_doc.py` writes it, `--check` only says whether it is up to date.
"""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

from edgeagent.config.loader import camel
from edgeagent.config.schema import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by tools/make_config_doc.py from edgeagent/config/schema.py: do not edit by hand. -->

One YAML file, by default `/etc/edgeagent/agent.yaml`; every key has a default, an empty file works. The
unit is part of a key's name, so values are plain numbers. Unknown keys, wrong types and impossible
values are refused together, each with its line. Check a file with:

<!-- not run: needs your file -->
```sh
edgeagent check-config /etc/edgeagent/agent.yaml
```

Keys marked ↻ change on reload (`edgeagent reload`, SIGHUP); the others need a restart.
"""


def _type(annotation: object) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _type(next(a for a in args if a is not type(None)))
    if origin is tuple:
        return f"list of {_type(args[0])}" if not is_dataclass(args[0]) else "list"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "true/false"}.get(annotation, "any")  # type: ignore[call-overload, no-any-return]


def _default(f: object) -> str:
    default = getattr(f, "default", MISSING)
    if default is MISSING or default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def _section(cls: type, path: str, out: list[str]) -> None:
    hints = typing.get_type_hints(cls)
    rows, nested = [], []
    for f in fields(cls):
        name = f.metadata.get("yaml") or camel(f.name)
        annotation = hints[f.name]
        inner = next((a for a in (annotation, *typing.get_args(annotation)) if is_dataclass(a)), None)
        if inner is not None:
            is_list = typing.get_origin(annotation) is tuple
            nested.append((inner, f"{path}.{name}" if path else name, is_list, f.metadata.get("doc", "")))
            continue
        bounds = f.metadata
        limits = ""
        if bounds.get("choices"):
            limits = " \\| ".join(bounds["choices"])
        elif bounds.get("low") is not None or bounds.get("high") is not None:
            low = "" if bounds.get("low") is None else f"{bounds['low']:g}"
            high = "" if bounds.get("high") is None else f"{bounds['high']:g}"
            limits = f"{low}…{high}"
        mark = " ↻" if bounds.get("reload") else ""
        kind = limits or _type(annotation)
        rows.append(f"| `{name}`{mark} | {kind} | {_default(f)} | {bounds.get('doc', '')} |")
    if rows:
        title = f"`{path}`" if path else "Top level"
        out.append(f"\n## {title}\n")
        doc = (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""
        if doc and not doc.startswith(cls.__name__):
            out.append(f"{doc}\n")
        out += ["| key | values | default | meaning |", "|---|---|---|---|", *rows]
    for inner, inner_path, is_list, _doc in nested:
        _section(typing.cast(type, inner), inner_path + ("[]" if is_list else ""), out)


def page() -> str:
    out: list[str] = [HEAD]
    _section(Config, "", out)
    return "\n".join(out) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
