"""Which implementation of the attention and small fused ops a model uses, from the setting and the device."""

from __future__ import annotations

import torch

from kvferry_engine.config import AttentionBackendName
from kvferry_engine.errors import ConfigError
from kvferry_kernels.dispatch import Backend

_BACKENDS = {
    AttentionBackendName.TRITON: Backend.TRITON,
    AttentionBackendName.CPU: Backend.CPU,
    AttentionBackendName.TORCH: Backend.REFERENCE,
}


def choose_backend(name: AttentionBackendName, device: torch.device) -> Backend:
    """Return the kernels to use. Raises ConfigError when the CPU kernels are asked for on another device."""
    if name is AttentionBackendName.AUTO:
        return Backend.CPU if device.type == "cpu" else Backend.TRITON
    if name is AttentionBackendName.CPU and device.type != "cpu":
        raise ConfigError(f"--attention-backend cpu needs --device cpu; the model runs on {device.type}, use triton")
    return _BACKENDS[name]
