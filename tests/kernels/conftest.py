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


GRID_STRIDE = 1 if os.environ.get("KVFERRY_FULL_GRID") == "1" else 13
"""The interpreter needs 25 minutes for the whole slow grid: every 13th case (no period of the grid) unless all are asked for."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    left_out = set(slow) - set(slow[::GRID_STRIDE])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


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
