"""CPU threads of a rank follow affinity and cgroup quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry_engine.errors import ConfigError
from kvferry_engine.runner.threads import available_cpus, make_openmp_passive, threads_per_rank

NUM_CPUS = len(os.sched_getaffinity(0))


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == NUM_CPUS


def test_a_version_2_quota_bounds_the_count(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "50000 100000\n")
    assert available_cpus(tmp_path) == 0.5


def test_a_version_1_quota_bounds_the_count(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "80000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert available_cpus(tmp_path) == 0.8


def test_every_rank_gets_at_least_one_thread(tmp_path: Path) -> None:
    assert threads_per_rank(None, 1000, tmp_path) == 1


def test_a_requested_count_is_used_and_checked() -> None:
    assert threads_per_rank(3, 2) == 3
    with pytest.raises(ConfigError, match="--threads 0"):
        threads_per_rank(0, 1)


def test_a_chosen_wait_policy_is_kept() -> None:
    chosen, empty = {"OMP_WAIT_POLICY": "active"}, dict[str, str]()
    make_openmp_passive(chosen)
    make_openmp_passive(empty)
    assert (chosen["OMP_WAIT_POLICY"], empty["OMP_WAIT_POLICY"]) == ("active", "passive")
