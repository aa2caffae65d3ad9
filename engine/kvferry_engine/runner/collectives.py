"""Builds the process group over which the ranks of one engine sum and gather: gloo on CPUs, NCCL on GPUs.

The group is constructed directly, without torch's global group, which the pair groups of `transfer` do not need either.
Ranks meet at a file in a private folder, so nothing listens for the meeting, and gloo binds to loopback.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from kvferry_engine.layers.parallel import Collectives, TensorParallel

GROUP_TIMEOUT = timedelta(minutes=5)
"""Longest the meeting or any collective may take; a rank that dies ends gloo collectives at once by closing its connections."""


def join_group(*, store_path: str, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Return this rank's place in the group. Blocks until all `size` ranks have called it."""
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    group: object
    if device.type == "cuda":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = GROUP_TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
    else:
        gloo_options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo_options._timeout = GROUP_TIMEOUT
        group = dist.ProcessGroupGloo(store, rank, size, gloo_options)
    return TensorParallel(rank=rank, size=size, group=cast("Collectives", group))
