"""Linear layers on CPUs with weights packed once; GPUs need no packing and use torch's own linear."""

from __future__ import annotations

from kvferry_kernels.linear.cpu import PackedWeight, can_pack, linear, pack

__all__ = ["PackedWeight", "can_pack", "linear", "pack"]
