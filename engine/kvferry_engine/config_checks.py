"""Ranges of engine settings that no other part checks, so that a wrong value is told before anything is loaded.

What depends on the model or the machine (lengths, block size, ranks, devices, threads) is judged by the part that knows it.
"""

from __future__ import annotations

import math

from kvferry_engine.config import EngineConfig
from kvferry_engine.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LAST_PORT = 65535

_POSITIVE = (
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_queued_reqs",
    "tensor_parallel_size",
    "staging_slots",
    "staging_slot_bytes",
)
_PORTS = ("port", "store_port", "http_port")


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError for the first setting out of its range; it names the flag, the value and what is allowed."""
    for name in _POSITIVE:
        value = getattr(config, name)
        _require(config, name, value is None or value >= 1, "at least 1")
    for name in _PORTS:
        _require(config, name, 0 <= getattr(config, name) <= LAST_PORT, f"0 (any free port) to {LAST_PORT}")
    _require(config, "gpu_memory_utilization", 0.0 < config.gpu_memory_utilization <= 1.0, "above 0 and at most 1")
    _require(config, "max_logprobs", config.max_logprobs >= -1, "at least 0, or -1 for no limit")
    _require(config, "drain_seconds", 0.0 <= config.drain_seconds < math.inf, "at least 0 and finite")
    _require(config, "log_level", config.log_level.lower() in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}")


def _require(config: EngineConfig, name: str, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(f"--{name.replace('_', '-')} {getattr(config, name)}: allowed is {allowed}")
