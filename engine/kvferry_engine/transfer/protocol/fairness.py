"""Which transfer sends its next chunk: the one with least left, unless another has waited long.

Shortest remaining first keeps small prompts from queueing behind a very long one; ageing keeps the long one moving.
"""

from __future__ import annotations

from kvferry_engine.transfer.protocol.sender import Sender

HALVE_AFTER_S = 0.1
"""Waiting this long halves how much a transfer seems to have left; waiting n times as long divides it by n + 1."""


def urgency(sender: Sender, now: float) -> float:
    """Smaller goes first. Blocks left, divided by a term that grows with the time since the last chunk."""
    return sender.num_blocks_left / (1.0 + max(now - sender.last_sent_s, 0.0) / HALVE_AFTER_S)
