"""Command lines of routers and engines, built from an LLMService by the same functions for processes and for pods.

Pure: where a process listens and finds its peers comes in as an address, which is all that differs between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_engine.wire.messages import Role
from kvferry_operator.errors import Problem, SpecError
from kvferry_operator.quantities import to_bytes
from kvferry_operator.resources import (
    DisaggregationMode,
    LLMService,
    OnPrefillUnavailable,
    RoutingPolicy,
    Source,
    Task,
)

MODEL_MOUNT = "/models"
"""Where pods see the weights of a claim or an image."""

_POLICIES = {
    RoutingPolicy.KV_AWARE: "kv_aware",
    RoutingPolicy.LEAST_LOAD: "least_load",
    RoutingPolicy.ROUND_ROBIN: "round_robin",
}
_MODES = {
    DisaggregationMode.AUTO: "auto",
    DisaggregationMode.ALWAYS: "always",
    DisaggregationMode.NEVER: "never",
}
_UNAVAILABLE = {
    OnPrefillUnavailable.DECODE_LOCALLY: "decode_locally",
    OnPrefillUnavailable.FAIL: "reject",
}
_ALIASES = {"-tp": "--tensor-parallel-size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where one engine listens: wire, TCPStore and HTTP port. `host` is bound, `advertise_host` is told to peers."""

    host: str
    port: int
    store_port: int
    http_port: int
    advertise_host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """Where one router listens (API, state) and finds engines (`static:...` or `dns:...`, empty: none)."""

    host: str
    port: int
    state_port: int
    decode: str
    prefill: str


def model_argument(source: Source) -> str:
    """Return what `kvferry engine` calls the model of a source."""
    if source.package is not None:
        return f"pkg:{source.package}"
    if source.hf is not None:
        return source.hf.repo
    if source.pvc is not None:
        return f"{MODEL_MOUNT}/{source.pvc.path}".rstrip("/")
    if source.path is not None:
        return source.path
    return MODEL_MOUNT


def engine_argv(
    program: Sequence[str],
    service: LLMService,
    role: Role,
    address: EngineAddress,
    *,
    threads: int | None = None,
    log_level: str | None = None,
    wire_secret_file: str | None = None,
) -> list[str]:
    """Return the command line of one engine of `role`; `program` is what comes before `engine`, such as ["kvferry"].

    Raises SpecError for a task that this version cannot serve and for extraArgs that repeat what stands here.
    """
    spec = service.spec
    if spec.model.task not in (None, Task.GENERATE):
        message = f"{spec.model.task} is not served by this version, allowed: {Task.GENERATE}"
        raise SpecError([Problem(path="spec.model.task", message=message)])
    group = spec.prefill if role is Role.PREFILL else spec.decode
    flags: dict[str, object] = {
        "--role": role,
        "--dtype": spec.model.dtype,
        "--block-size": spec.engine.block_size,
        "--max-num-seqs": spec.engine.max_num_seqs,
        "--max-num-batched-tokens": spec.engine.max_num_batched_tokens,
        "--tensor-parallel-size": group.tensor_parallel if group is not None else 1,
        "--max-model-len": spec.model.max_model_len,
        "--kv-cache-memory-bytes": None
        if spec.engine.kv_cache_memory is None
        else to_bytes(spec.engine.kv_cache_memory),
        "--revision": spec.model.source.hf.revision if spec.model.source.hf is not None else None,
        "--host": address.host,
        "--advertise-host": address.advertise_host,
        "--port": address.port,
        "--store-port": address.store_port,
        "--http-port": address.http_port,
        "--drain-seconds": spec.rollout.drain_seconds,
        "--service": service.identity,
        "--wire-secret-file": wire_secret_file,
    }
    _refuse_repeated(spec.engine.extra_args, [*flags, "--served-model-name"])
    # The names of the model end at the next flag, hence before all others.
    names = ["--served-model-name", spec.model.name, *spec.model.aliases]
    tuning: dict[str, object] = {"--threads": threads, "--log-level": log_level}
    return [
        *program,
        "engine",
        model_argument(spec.model.source),
        *names,
        *_tokens(flags),
        *_tokens(tuning),
        *spec.engine.extra_args,
    ]


def router_argv(
    program: Sequence[str],
    service: LLMService,
    address: RouterAddress,
    *,
    name: str | None = None,
    shutdown_delay_s: float | None = None,
    log_level: str | None = None,
    api_key_file: str | None = None,
    wire_secret_file: str | None = None,
) -> list[str]:
    """Return the command line of one router; `name` is what engines call it (default: its host name).

    `shutdown_delay_s`: how long it still accepts after SIGTERM; only load balancers in front need that.
    """
    spec = service.spec
    flags: dict[str, object] = {
        "--host": address.host,
        "--port": address.port,
        "--metrics-port": address.state_port,
        "--decode": address.decode,
        "--prefill": address.prefill or None,
        "--policy": _POLICIES[spec.router.policy],
        "--max-queued-requests": spec.router.max_queued_requests,
        "--disaggregation": _MODES[spec.disaggregation.mode],
        "--on-prefill-unavailable": _UNAVAILABLE[spec.disaggregation.on_prefill_unavailable],
        "--shutdown-timeout": spec.rollout.drain_seconds,
        "--shutdown-delay": shutdown_delay_s,
        "--service": service.identity,
        "--name": name,
        "--log-level": log_level,
        "--api-key-file": api_key_file,
        "--wire-secret-file": wire_secret_file,
    }
    return [*program, "router", *_tokens(flags)]


def _tokens(flags: dict[str, object]) -> list[str]:
    return [token for flag, value in flags.items() if value is not None for token in (flag, str(value))]


def _refuse_repeated(extra_args: Sequence[str], taken: Sequence[str]) -> None:
    """Raise SpecError when an extra argument is a flag that the command line has already."""
    problems = []
    for index, argument in enumerate(extra_args):
        flag = argument.split("=", 1)[0]
        if _ALIASES.get(flag, flag) in taken:
            message = f"{flag} is set from other fields of the manifest; change those instead"
            problems.append(Problem(path=f"spec.engine.extraArgs[{index}]", message=message))
    if problems:
        raise SpecError(problems)
