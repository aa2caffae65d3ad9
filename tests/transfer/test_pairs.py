"""Store connections are reused, and an engine that restarted at the same address is met again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry_engine.transfer import pairs

HOST = """
import sys, time
from kvferry_engine.transfer import pairs
store, port = pairs.host_store("127.0.0.1", int(sys.argv[1]))
print(port, flush=True)
time.sleep(120)
"""


def start_host(port: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", HOST, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_connection_is_used_again_unless_its_use_failed() -> None:
    store, port = pairs.host_store("127.0.0.1", 0)
    stores, address = pairs.Stores(), f"127.0.0.1:{port}"

    with stores.borrow(address) as first:
        first.set("kvferry/x", "1")
    with stores.borrow(address) as second, stores.borrow(address) as third:
        assert second is first
        assert third is not first
    with pytest.raises(RuntimeError), stores.borrow(address) as broken:
        raise RuntimeError("connection reset")
    with stores.borrow(address) as fourth:
        assert fourth is not broken
    assert store.get("kvferry/x") == b"1"


@pytest.mark.parametrize("address", ["nowhere", "host:", ":7080", "host:port"])
def test_addresses_without_host_or_port_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"), pairs.Stores().borrow(address):
        pass


def test_addresses_may_be_ipv6() -> None:
    assert pairs.split_address("[::1]:7080") == ("::1", 7080)


@pytest.mark.slow
def test_a_restarted_store_at_the_same_address_is_met_again() -> None:
    stores = pairs.Stores()
    host, port = start_host(0)
    with stores.borrow(f"127.0.0.1:{port}") as first:
        first.set("kvferry/x", "1")
    host.kill()
    host.wait()

    host, _ = start_host(port)
    try:
        with stores.borrow(f"127.0.0.1:{port}") as second:
            assert second is not first
            assert not second.check(["kvferry/x"])
    finally:
        host.kill()
        host.wait()
