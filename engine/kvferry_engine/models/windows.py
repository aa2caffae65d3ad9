"""Which layers of a model have a sliding window."""

from __future__ import annotations

from kvferry_engine.config import ModelConfig

SLIDING = "sliding_attention"


def layer_windows(config: ModelConfig) -> list[int]:
    """Return the window of every layer in tokens, 0 for full attention; `layer_types` names them."""
    return [config.sliding_window if kind == SLIDING else 0 for kind in config.layer_types]
