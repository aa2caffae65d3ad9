"""`kvferry up`: an LLMService manifest as processes of this machine, with the command lines that pods would have.

This module reads the manifest and plans (which children, which ports, how many threads); `launch` runs the plan.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry_engine.wire.messages import Role
from kvferry_operator.commands import EngineAddress, RouterAddress, engine_argv, router_argv
from kvferry_operator.errors import Problem, SpecError
from kvferry_operator.launch import (
    PORTS_PER_ENGINE,
    PROGRAM,
    WIRE_HOST,
    LocalPlan,
    api_url,
    engine_child,
    reachable_host,
    router_child,
    run_plan,
)
from kvferry_operator.machine import check_port, free_ports, usable_cores
from kvferry_operator.resources import EngineGroup, LLMService, Place, load_documents, parse_service

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `kvferry up` was asked for. `port` None: the manifest's expose.port; `service` picks one of several."""

    filename: Path
    service: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    api_key_file: Path | None = None
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of all processes: API and state per router, addresses per engine."""

    api: tuple[int, ...]
    state: tuple[int, ...]
    engines: Mapping[Role, tuple[EngineAddress, ...]]


def run_up(options: UpOptions, announce: Callable[[str], None]) -> int:
    """Run a manifest until a signal ends it; returns the exit code.

    `announce` gets the lines that belong on standard output. Raises SpecError, PortError and ChildFailedError.
    """
    started = time.monotonic()
    service = read_manifest(options.filename, options.service)
    for note in notes_for_local(service):
        _logger.info("%s", note)
    plan = plan_service(service, options, allot_ports(service, options), cores=usable_cores())
    return run_plan(plan, announce, started=started)


def read_manifest(filename: Path, wanted: str | None) -> LLMService:
    """Return the LLMService of a YAML file. Raises SpecError when there is none, or several and none is named."""
    try:
        text = filename.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem(path=str(filename), message=error.strerror or str(error))]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Problem(path=str(filename), message="not a text file in UTF-8")]) from error
    documents = load_documents(text)
    candidates = [document for document in documents if not isinstance(document, dict) or _is_service(document)]
    if not documents or not candidates:
        raise SpecError([Problem(path=str(filename), message="contains no LLMService")])
    services = [parse_service(document, place=Place.LOCAL) for document in candidates]
    if wanted is not None:
        services = [service for service in services if service.name == wanted]
    if len(services) != 1:
        found = ", ".join(service.name for service in services) or "none of that name"
        message = f"one LLMService is run at a time, found: {found}; choose with --service NAME"
        raise SpecError([Problem(path=str(filename), message=message)])
    return _with_absolute_path(services[0], filename.resolve().parent)


def notes_for_local(service: LLMService) -> list[str]:
    """Return one line per part of the manifest that has no meaning for processes."""
    spec = service.spec
    ignored = {
        "spec.image": spec.image,
        "spec.expose.ingress": spec.expose.ingress,
        "spec.expose.httpRoute": spec.expose.http_route,
        "spec.cache": spec.cache,
        "spec.wireKeySecretRef": spec.wire_key_secret_ref,
    }
    return [f"{path} has no meaning here: only pods use it" for path, value in ignored.items() if value is not None]


def allot_ports(service: LLMService, options: UpOptions) -> Ports:
    """Return ports that are free now: the manifest's for the API, any for the rest. Raises PortError."""
    first = options.port if options.port is not None else service.spec.expose.port
    num_routers = service.spec.router.replicas or 1
    api = tuple(range(first, first + num_routers))
    for port in api:
        check_port(options.host, port)
    sizes = {role: group.replicas if group is not None else 0 for role, group in _groups(service).items()}
    num_ports = num_routers + PORTS_PER_ENGINE * sum(sizes.values())
    free = free_ports(num_ports, WIRE_HOST, taken=frozenset(api), draw=random.Random())
    engines = {
        role: tuple(
            EngineAddress(host=WIRE_HOST, port=free.pop(), store_port=free.pop(), http_port=free.pop())
            for _ in range(size)
        )
        for role, size in sizes.items()
    }
    return Ports(api=api, state=tuple(free), engines=engines)


def plan_service(service: LLMService, options: UpOptions, ports: Ports, *, cores: int) -> LocalPlan:
    """Return the processes of a service. Raises SpecError for what cannot run here."""
    _check_runnable(service, options)
    spec = service.spec
    groups = _groups(service)
    num_ranks = sum(len(ports.engines[role]) * group.tensor_parallel for role, group in groups.items() if group)
    threads = max(1, cores // max(1, num_ranks))
    engines = [
        engine_child(
            f"{role}-{index}",
            engine_argv(PROGRAM, service, role, address, threads=threads, log_level=options.log_level),
            threads=threads,
            extra=_environment(groups[role]),
        )
        for role, addresses in ports.engines.items()
        for index, address in enumerate(addresses)
    ]
    key_file = str(options.api_key_file) if options.api_key_file is not None else None
    routers = []
    for index, (port, state_port) in enumerate(zip(ports.api, ports.state, strict=True)):
        address = RouterAddress(
            host=options.host,
            port=port,
            state_port=state_port,
            decode=_static_source(ports.engines[Role.DECODE]),
            prefill=_static_source(ports.engines[Role.PREFILL]),
        )
        name = f"router-{index}"
        argv = router_argv(
            PROGRAM,
            service,
            address,
            name=name,
            shutdown_delay_s=0.0,
            log_level=options.log_level,
            api_key_file=key_file,
        )
        routers.append(router_child(name, argv))
    return LocalPlan(
        name=service.name,
        model=spec.model.name,
        children=(*routers, *engines),
        api_urls=tuple(api_url(options.host, port) for port in ports.api),
        state_host=reachable_host(options.host),
        state_port=ports.state[0],
        num_prefill=len(ports.engines[Role.PREFILL]),
        num_decode=len(ports.engines[Role.DECODE]),
        load_timeout_s=spec.model.load_timeout_seconds,
        drain_s=spec.rollout.drain_seconds,
        needs_key=options.api_key_file is not None,
    )


def _groups(service: LLMService) -> dict[Role, EngineGroup | None]:
    return {Role.PREFILL: service.spec.prefill, Role.DECODE: service.spec.decode}


def _static_source(addresses: Sequence[EngineAddress]) -> str:
    listed = ",".join(f"{address.host}:{address.port}" for address in addresses)
    return f"static:{listed}" if addresses else ""


def _is_service(document: dict[str, object]) -> bool:
    return document.get("kind") in (None, "LLMService")


def _environment(group: EngineGroup | None) -> dict[str, str]:
    """Return the literal environment variables of a role's pod template."""
    entries = group.pod_template.env if group is not None else ()
    return {entry.name: entry.value for entry in entries if entry.value is not None}


def _check_runnable(service: LLMService, options: UpOptions) -> None:
    """Raise SpecError for what only a cluster can do."""
    spec = service.spec
    problems = []
    if spec.suspend:
        problems.append(Problem(path="spec.suspend", message="the service is suspended, there is nothing to run"))
    for member in ("pvc", "image"):
        if getattr(spec.model.source, member) is not None:
            message = "only pods can mount this; use package, hf or path here"
            problems.append(Problem(path=f"spec.model.source.{member}", message=message))
    if spec.expose.api_key_secret_ref is not None and options.api_key_file is None:
        message = "there are no Secrets here; give the accepted keys with --api-key-file FILE, one a line"
        problems.append(Problem(path="spec.expose.apiKeySecretRef", message=message))
    if problems:
        raise SpecError(problems)


def _with_absolute_path(service: LLMService, base: Path) -> LLMService:
    source = service.spec.model.source
    if source.path is None:
        return service
    model = msgspec.structs.replace(
        service.spec.model, source=msgspec.structs.replace(source, path=str((base / source.path).resolve()))
    )
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, model=model))
