"""How many CPU threads a rank may use, from affinity and cgroup quota, so that ranks and neighbours do not trample each other.

Two OpenMP threads on an oversubscribed two-core container were 3 to 8 times slower than one (measured, spinning barriers),
hence the count never exceeds the quota and waits are passive. OpenMP reads its environment when torch is loaded:
`main` calls `make_openmp_passive` before it imports torch, `ranks` puts the same variables into the environment of the
processes it starts. This module therefore must not import torch at its top.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

from kvferry_engine.errors import ConfigError

SPIN_COUNT = "10000"
"""Iterations of libgomp's wait loop, well under 0.1 ms: bridges the gap between two operators, not the one between two steps."""


def make_openmp_passive(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP threads sleep while they wait, after a short spin, unless the person chose otherwise.

    Call before torch is imported. Waking a sleeping thread costs some 50 microseconds and a decode step has 120 linears:
    without any spin two threads were slower than one (SmolLM2's linears in bf16 at 1, 8 and 32 rows: 21, 27 and 46 ms; with
    it 11, 15 and 32 ms; EPYC with AVX512-BF16, 2 cores, torch 2.15, 2026-12-01).
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def available_cpus(root: Path = Path("/")) -> float:
    """Return the CPUs this process may use: its affinity, bounded by the cgroup's quota (v2 or v1)."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def threads_per_rank(requested: int | None, num_ranks: int, root: Path = Path("/")) -> int:
    """Return the threads of one rank: what was asked for, else an equal share of the CPUs, at least 1. Raises ConfigError."""
    if requested is not None:
        if requested < 1:
            raise ConfigError(f"--threads {requested} is not positive")
        return requested
    return max(math.floor(available_cpus(root) / num_ranks), 1)


def apply_threads(num_threads: int) -> None:
    """Set the number of threads torch computes with, in this process."""
    import torch

    torch.set_num_threads(num_threads)


def _quotas(root: Path) -> list[float]:
    quotas: list[float] = []
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        for folder in {path.lstrip("/"), ""}:
            if controllers == "":
                quota = _quota_v2(root / "sys/fs/cgroup" / folder)
            elif "cpu" in controllers.split(","):
                quota = _quota_v1(root / "sys/fs/cgroup/cpu" / folder)
            else:
                quota = None
            if quota is not None:
                quotas.append(quota)
    return quotas


def _quota_v2(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return limit / period if limit > 0 else None
