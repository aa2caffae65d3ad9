"""Log lines of the commands that supervise processes, in the same shape for `up` and `serve`."""

from __future__ import annotations

import logging


def configure(log_level: str) -> None:
    """Send kvferry's own log lines to standard error, as plain sentences beside the children's."""
    logging.basicConfig(level=log_level.upper(), format="kvferry: %(message)s")
