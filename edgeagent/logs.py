"""How log lines look: plain text, journald priorities, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


class _TextFormatter(logging.Formatter):
    """One line an event; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname.lower():8} {_short(record.name)}: "
        line += _one_line(record.getMessage())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JournalFormatter(logging.Formatter):
    """sd-daemon(3) priority prefix on every line; journald adds the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_short(record.name)}: {_one_line(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in text.splitlines())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": _short(record.name),
            "msg": record.getMessage(),
            "thread": record.threadName,
        }
        if record.exc_info:
            entry["exc"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _short(name: str) -> str:
    return name.removeprefix("edgeagent.")


def set_up(level: str = "info", fmt: str = "auto") -> None:
    """Sends the root logger to stderr. `fmt`: auto (journald priorities where stderr is the
    journal), text or json."""
    handler = logging.StreamHandler(sys.stderr)
    if fmt == "json":
        handler.setFormatter(_JsonFormatter())
    elif fmt == "auto" and _stderr_is_journal():
        handler.setFormatter(_JournalFormatter())
    else:
        handler.setFormatter(_TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    # At debug, grpc writes a line of its own innards for every call.
    logging.getLogger("grpc").setLevel(max(logging.INFO, logging.getLogger().level))


def _stderr_is_journal() -> bool:
    """sd_journal_print(3): JOURNAL_STREAM names device and inode of the stream we were given."""
    try:
        stat = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"
