"""The scheduler's limits, resolved: what `EngineConfig` asks for once model and memory are known."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.config import SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine's scheduler.

    `lookahead`: steps that may be launched before the oldest one retired, 0 or 1. With 1, step n + 1 is planned while step n
    runs; tokens that n samples are placeholders in it.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_prefix_caching: bool = True
    lookahead: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for limits nothing could run under."""
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead must be 0 or 1, got {self.lookahead}")
