import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(*selection: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", "-k", "triton", *selection]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreting process")
def test_triton_kernels_equal_their_references_in_the_interpreter() -> None:
    result = run_interpreted("-m", "not slow")

    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreting process")
def test_triton_kernels_equal_their_references_on_the_slow_grid() -> None:
    result = run_interpreted("-m", "slow")

    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
