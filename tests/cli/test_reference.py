"""The list of commands and flags is frozen: docs/cli.md is what the settings say, and vLLM's names stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.commands import serve
from kvferry.flags import Parser

_ROOT = Path(__file__).parents[2]

# fmt: off
_VLLM_SERVE_FLAGS = [
    "--served-model-name", "--dtype", "--max-model-len", "--port", "--host", "--block-size", "--max-num-seqs",
    "--max-num-batched-tokens", "--tensor-parallel-size", "-tp", "--api-key", "--chat-template", "--seed",
    "--revision", "--load-format", "--gpu-memory-utilization", "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override", "--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce-eager",
    "--scheduling-policy", "--max-logprobs", "--logprobs-mode", "--generation-config", "--attention-backend",
    "--root-path", "--ssl-keyfile", "--ssl-certfile", "--uds", "--response-role", "--max-num-queued-reqs",
    "--config", "--device",
]
# fmt: on


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, str(_ROOT / "scripts" / "make_cli_reference.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    expected = (_ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert printed == expected, "flags changed: run `make docs` and read the difference"


@pytest.mark.parametrize("flag", _VLLM_SERVE_FLAGS)
def test_serve_understands_the_names_vllm_users_know(flag: str) -> None:
    parser = Parser(prog="kvferry serve")
    serve.add_arguments(parser)

    assert flag in parser._option_string_actions
