"""Merging on CPUs: the CPU attention paths do not split sequences, so the plain formula is fast enough."""

from __future__ import annotations

from kvferry_kernels.merge.reference import merge_states

__all__ = ["merge_states"]
