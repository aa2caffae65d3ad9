"""How semantic checks fail: one helper, so that every message ends the same way, and one list of what is not served yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvferry_server.errors import BadRequestError, NotImplementedByModelError

MAX_ECHOED_CHARS = 200


def invalid(message: str, *, param: str, value: Any) -> BadRequestError:
    """Return the error for a field whose value is not allowed; the message ends with both, as clients expect."""
    return BadRequestError(f"{message} (parameter={param}, value={shorten(value)})", param=param)


def unsupported(feature: str, *, param: str) -> NotImplementedByModelError:
    """Return the error for a documented feature that this server does not have."""
    return NotImplementedByModelError(f"{feature} is not supported by this server.", param=param)


def shorten(value: Any) -> str:
    """Return a value for an error message: containers by size, long texts cut."""
    if isinstance(value, dict):
        return f"<object with {len(value)} keys>"
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return f"<list of {len(value)}>"
    if isinstance(value, str) and len(value) > MAX_ECHOED_CHARS:
        return repr(value[:MAX_ECHOED_CHARS]) + "..."
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "<huge number>"
    return repr(value)
