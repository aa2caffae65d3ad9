"""Which implementations the kernel tests compare with the reference, and where.

Triton kernels run on a GPU if there is one, else in Triton's interpreter, which has to be chosen before Triton is first
imported. Since other tests of the same process may have imported it, `test_interpreter` runs the Triton half of this
folder in a process of its own. For a closer look: TRITON_INTERPRET=1 pytest tests/kernels -k triton
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.testing import poisoned_allocations

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.sum, InterpretedFunction):
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 came after Triton was imported: its kernels would not be interpreted"
        )


def backends() -> list[Backend]:
    if INTERPRETED or torch.cuda.is_available():
        return [Backend.CPU, Backend.TRITON]
    return [Backend.CPU]


@pytest.fixture(params=backends(), ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def device(backend: Backend) -> str:
    return "cuda" if backend is Backend.TRITON and not INTERPRETED else "cpu"


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_allocations():
        yield
