"""A DeepSpeed config from where users have it: a file, a mapping, base64 text."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zinf.errors import ConfigError

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z)", re.S)
_TRAILING = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config that a path, a mapping or base64 text of JSON holds. Comments and trailing commas may be there; all of Hjson where `hjson` is installed.

    Raises:
        ConfigError: no such file, no valid JSON (with the line), a key that is there twice, no mapping.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: {e}") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in a path
        if isinstance(e, ConfigError):
            raise
        text = _from_base64(str(source))
        if text is None:
            raise ConfigError(f"{brief(str(source))}: {getattr(e, 'strerror', None) or e}") from None
    return _parse(text, "base64 config")


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{name}: {brief(key)} is there twice: keep one")
            found[key] = value
        return found

    plain = _COMMENT.sub(lambda m: m[1] or " " + "\n" * m[0].count("\n"), text)
    try:
        values = json.loads(_TRAILING.sub(lambda m: m[1] or " ", plain), object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as e:
        values = _hjson(text, name, e, unique)
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected keys and values, found {type(values).__name__}")
    return values


def _hjson(text: str, name: str, error: Exception, unique: Any) -> Any:
    """What is more than JSON with comments: keys and texts without quotes."""
    try:
        import hjson
    except ImportError:
        raise ConfigError(f"{name}: {error}; where it is Hjson without quotes, `pip install hjson`") from None
    try:
        return hjson.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except Exception as e:  # IndexError, OverflowError and more, whatever meets its parser in a damaged file
        raise ConfigError(f"{name}: {' '.join(str(e).split())}") from None


def brief(value: Any, limit: int = 80) -> str:
    """One short line that can be printed anywhere: text as it is, else as JSON writes it."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=repr)
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
