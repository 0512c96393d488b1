"""Log lines as text or JSON. What a client wrote (bodies, keys, query strings) is never logged.

A call may add fields to its line with ``extra={"fields": {...}}``.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from ..config import ServerSettings


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        record.tail = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def formatter(log_format: str) -> logging.Formatter:
    if log_format == "json":
        return _JsonFormatter()
    return _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s%(tail)s")


def configure(settings: ServerSettings) -> None:
    """Send all log lines to stderr in the chosen form, uvicorn's among them (run it with ``log_config=None``)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings.log_format))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # the border logs each request, once
