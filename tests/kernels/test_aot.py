import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry_kernels import aot
from kvferry_kernels.device_math import is_interpreted

OPS = {"merge", "paged_attention", "rms_norm", "rope_kv", "sampler", "silu_mul", "staging", "varlen_attention"}

pytestmark = pytest.mark.skipif(is_interpreted(), reason="interpreted kernels cannot be compiled")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the interpreter, where this process uses it, leaves nothing to compile.
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_every_kernel_has_variants_for_every_target() -> None:
    modules = aot.op_modules()

    assert {module.__name__.split(".")[1] for module in modules} == OPS
    assert sum(len(aot.kernels_of(module)) for module in modules) >= 12
    assert aot.uncovered_kernels() == []


def test_kernels_take_at_most_twenty_arguments() -> None:
    counts = {
        name: len(getattr(module, name).arg_names) for module in aot.op_modules() for name in aot.kernels_of(module)
    }

    assert max(counts.values()) <= 20, counts


def test_resources_are_read_from_compiler_output() -> None:
    assert aot.nvidia_usage(
        "ptxas info    : Function properties for k\n    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers\n"
    ) == (96, 20)
    assert aot.amd_usage("  .private_segment_fixed_size: 16\n    .vgpr_count:     110\n") == (110, 16)
    with pytest.raises(ValueError, match="did not report"):
        aot.nvidia_usage("")


@pytest.mark.slow
def test_the_gate_refuses_to_run_interpreted() -> None:
    result = run("-m", "kvferry_kernels.aot", TRITON_INTERPRET="1")

    assert result.returncode == 2
    assert "unset TRITON_INTERPRET" in result.stderr


@pytest.mark.slow
def test_one_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    result = run(
        "-m", "kvferry_kernels.aot", "--only", "silu_mul_kernel bf16", "--jobs", "1", TRITON_CACHE_DIR=str(tmp_path)
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("silu_mul_kernel") + result.stdout.count("SKIP") == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_compile_gate_passes() -> None:
    result = run("-m", "kvferry_kernels.aot")

    assert result.returncode == 0, result.stdout + result.stderr
