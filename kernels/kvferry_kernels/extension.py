"""Finds the compiled CPU extension, once per process; absent is a normal answer (`build` makes it)."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger(__name__)


@functools.cache
def is_available() -> bool:
    """Load the extension if it was built for this torch and these sources; tell whether torch.ops.kvferry can be used."""
    from kvferry_kernels.build import library_path

    path = library_path()
    if not path.exists():
        log.info("cpu extension absent path=%s", path.name)
        return False
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch does not annotate it
    except OSError as error:
        log.warning("cpu extension does not load path=%s error=%s", path.name, error)
        return False
    log.info("cpu extension loaded isa=%s", torch.ops.kvferry.instruction_set())
    return True
