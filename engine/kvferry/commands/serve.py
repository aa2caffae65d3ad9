"""`kvferry serve MODEL`: a router and one engine of role `both`, as two supervised processes behind one command.

Takes the flags of both; what only matters between the two (ports, addresses, roles) is decided here.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from kvferry.commands.process_logging import configure
from kvferry.flags import Parser, add_config_flag, add_flags, given_values, to_argv
from kvferry_engine.config import EngineConfig
from kvferry_engine.wire.messages import Role
from kvferry_operator.errors import OperatorError
from kvferry_operator.launch import (
    PROGRAM,
    WIRE_HOST,
    LocalPlan,
    api_url,
    engine_child,
    reachable_host,
    router_child,
    run_plan,
)
from kvferry_operator.machine import check_port, free_ports
from kvferry_server.settings import GenerationConfig, RouterSettings

_BETWEEN_THE_TWO = (
    "role",
    "advertise_host",
    "store_port",
    "http_port",
    "metrics_port",
    "service",
    "wire_secret_file",
    "decode",
    "prefill",
    "name",
    "policy",
    "disaggregation",
    "on_prefill_unavailable",
    "transfer_transport",
    "staging_slots",
    "staging_slot_bytes",
    "drain_seconds",
)
"""Settings that a single engine behind its own router leaves nothing to choose for."""

_OF_THE_ROUTER = ("host", "port", "log_level", "chat_template", "max_num_queued_reqs")
"""Engine settings whose flag means the router's setting here."""

_LOAD_TIMEOUT_S = 1800.0


def add_arguments(parser: Parser) -> None:
    """Add the flags of router and engine in two groups."""
    parser.usage = "%(prog)s MODEL [flags]"
    router = parser.add_argument_group("router")
    engine = parser.add_argument_group("engine")
    add_flags(engine, EngineConfig, skip=(*_BETWEEN_THE_TWO, *_OF_THE_ROUTER))
    add_flags(router, RouterSettings, skip=(*_BETWEEN_THE_TWO, "generation_config"))
    add_config_flag(parser)


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Run both processes until a signal ends them."""
    started = time.monotonic()
    router = given_values(arguments, RouterSettings)
    engine = given_values(arguments, EngineConfig)
    if "model" not in engine:
        parser.error("a MODEL is required: a folder, a .gguf file, pkg:NAME or a hub id")
    configure(router.get("log_level", "info"))
    try:
        return run_plan(plan(router, engine), lambda line: print(line, flush=True), started=started)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def plan(router: dict[str, object], engine: dict[str, object]) -> LocalPlan:
    """Return the two processes for given router and engine settings. Raises PortError."""
    defaults = {name: field.default for name, field in RouterSettings.__dataclass_fields__.items()}
    host = str(router.get("host", defaults["host"]))
    port = int(str(router.get("port", defaults["port"])))
    drain_s = float(str(router.get("shutdown_timeout", defaults["shutdown_timeout"])))
    if "uds" in router:
        url = f"unix:{router['uds']}"
    else:
        check_port(host, port)
        url = api_url(host, port, scheme="https" if "ssl_certfile" in router else "http")
    wire_port, store_port, http_port, state_port = free_ports(
        4, WIRE_HOST, taken=frozenset([port]), draw=random.Random()
    )
    shared = {"log_level": router["log_level"]} if "log_level" in router else {}
    engine_values = (
        engine
        | shared
        | {
            "role": Role.BOTH,
            "host": WIRE_HOST,
            "port": wire_port,
            "store_port": store_port,
            "http_port": http_port,
        }
    )
    router_values = (
        {"shutdown_delay": 0.0}
        | router
        | {"decode": f"static:{WIRE_HOST}:{wire_port}", "metrics_port": state_port, "name": "router"}
    )
    if engine.get("generation_config") == GenerationConfig.VLLM:
        router_values["generation_config"] = GenerationConfig.VLLM
    names = engine.get("served_model_name")
    return LocalPlan(
        name="kvferry",
        model=str(names[0]) if isinstance(names, tuple) and names else str(engine["model"]),
        children=(
            router_child("router", [*PROGRAM, "router", *to_argv(router_values, RouterSettings)]),
            engine_child("engine", [*PROGRAM, "engine", *to_argv(engine_values, EngineConfig)]),
        ),
        api_urls=(url,),
        state_host=reachable_host(host),
        state_port=state_port,
        num_prefill=0,
        num_decode=1,
        load_timeout_s=_LOAD_TIMEOUT_S,
        drain_s=drain_s,
        needs_key=bool(router.get("api_key") or router.get("api_key_file")),
    )
