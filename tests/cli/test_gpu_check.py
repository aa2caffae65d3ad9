"""`scripts/gpu_check.py --dry-run`: every step of the first run on a GPU works as far as a CPU can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
_NEED_A_GPU = ["equality.cuda_graphs", "nccl.probe"]
_WITHOUT_A_GPU = [
    "kernels.decode_attention",
    "kernels.prefill_attention",
    "kernels.merge",
    "kernels.rms_norm_silu_mul",
    "kernels.rope_kv",
    "kernels.sampler",
    "kernels.staging",
    "equality.cold_and_warm",
    "equality.chunked",
    "equality.preempted",
    "equality.two_processes",
    "speed.decode_attention",
    "speed.prefill_attention",
    "generation.smollm2",
]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_dry_run_takes_every_step_and_skips_what_needs_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    result = subprocess.run(
        [sys.executable, str(_SCRIPT), "--dry-run", "--output", str(report)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )

    output = result.stdout + result.stderr[-4000:]
    assert result.returncode == 0, output
    status = {check["name"]: check["status"] for check in json.loads(report.read_text())["checks"]}
    assert status == dict.fromkeys(_WITHOUT_A_GPU, "ok") | dict.fromkeys(_NEED_A_GPU, "skip"), output
    assert [name for name in status if f"{status[name]} {name}: " not in result.stdout] == []


def test_without_a_gpu_it_says_so() -> None:
    result = subprocess.run(
        [sys.executable, str(_SCRIPT)], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )

    assert result.returncode == 2
    assert "--dry-run" in result.stderr
