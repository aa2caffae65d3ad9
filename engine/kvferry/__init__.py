"""The Python SDK of kvferry: `from kvferry import LLM, AsyncLLM, SamplingParams`.

Everything is imported on first use, so that the `kvferry` command starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.async_llm import AsyncLLM
    from kvferry.llm import LLM
    from kvferry.outputs import CompletionOutput, Logprob, RequestOutput
    from kvferry.params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvferry.{_MODULES[name]}"), name)
