"""What the transport relies on and torch does not document: measured facts about gloo pairs, kept true for the locked torch."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroupGloo, is_initialized

from kvferry_engine.errors import ConfigError, PortInUseError
from kvferry_engine.transfer import pairs
from kvferry_engine.transfer.transport.gloo import release_blocked

PREFIX = "kvferry/p/d/0-0/1"


def payload(size: int, value: int = 7) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def listening() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens."""
    mine = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, port = fields[1].split(":")
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def make_pair(store: pairs.TCPStore, prefix: str = PREFIX) -> tuple[pairs.PairGroup, pairs.PairGroup]:
    """(sender, receiver), each built in its own thread with its own store connection and device."""
    groups: dict[bool, pairs.PairGroup] = {}
    devices = {side: ProcessGroupGloo.create_device(hostname="127.0.0.1") for side in (True, False)}

    def build(is_sender: bool) -> None:
        groups[is_sender] = pairs.open_gloo_group(store.clone(), prefix, is_sender=is_sender, device=devices[is_sender])

    threads = [threading.Thread(target=build, args=(side,)) for side in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return groups[True], groups[False]


class Waiter(threading.Thread):
    """Blocks in `wait()` like a transport thread does."""

    def __init__(self, work: pairs.Work) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.error = str(error)

    def is_done(self, within_s: float) -> bool:
        self.join(within_s)
        return not self.is_alive()


@pytest.fixture
def store() -> Iterator[pairs.TCPStore]:
    store, _ = pairs.host_store("127.0.0.1", 0)
    yield store


@pytest.fixture
def pair(store: pairs.TCPStore) -> tuple[pairs.PairGroup, pairs.PairGroup]:
    return make_pair(store)


def test_a_pair_needs_no_global_group(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, receiver = pair
    view = payload(16, 0)

    work = receiver.recv([view], 0, 1)
    sender.send([payload(16)], 1, 1).wait()
    work.wait()

    assert torch.equal(view, payload(16))
    assert not is_initialized()


def test_messages_match_by_tag_in_any_order(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, receiver = pair
    views = {tag: payload(8, 0) for tag in (5, 6, 7)}
    stuck = receiver.recv([payload(8, 0)], 0, 99)

    works = [receiver.recv([views[tag]], 0, tag) for tag in (7, 5, 6)]
    sends = [sender.send([payload(8, tag)], 1, tag) for tag in (6, 7, 5)]
    for work in (*works, *sends):
        work.wait()

    assert all(torch.equal(views[tag], payload(8, tag)) for tag in views)
    assert not stuck.is_completed()  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_send_ends_only_when_its_receive_is_posted(pair: tuple[pairs.PairGroup, pairs.PairGroup], size: int) -> None:
    sender, receiver = pair
    waiter = Waiter(sender.send([payload(size)], 1, 3))
    assert not waiter.is_done(0.2)

    receiver.recv([payload(size, 0)], 0, 3).wait()

    assert waiter.is_done(5)
    assert waiter.error is None


def test_a_shorter_send_completes_a_longer_receive(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, receiver = pair
    view = payload(1 << 16, 1)
    work = receiver.recv([view], 0, 4)

    sender.send([payload(1, 9)], 1, 4).wait()
    work.wait()

    assert view[0] == 9
    assert bool((view[1:] == 1).all())
    again = receiver.recv([view], 0, 5)
    sender.send([payload(1 << 16)], 1, 5).wait()
    again.wait()


def test_a_work_is_not_complete_before_somebody_waits(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, receiver = pair
    work = receiver.recv([payload(8, 0)], 0, 1)
    sender.send([payload(8)], 1, 1).wait()
    time.sleep(0.1)

    assert not work.is_completed()  # type: ignore[attr-defined]
    work.wait()


def test_slices_travel_and_other_strides_are_refused(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, receiver = pair
    memory = torch.zeros(4, 64, dtype=torch.uint8)

    work = receiver.recv([memory[2, :32]], 0, 1)
    sender.send([payload(64)[:32]], 1, 1).wait()
    work.wait()

    assert int(memory.sum()) == 32 * 7
    with pytest.raises(RuntimeError, match="contiguous"):
        sender.send([torch.zeros(8, 8, dtype=torch.uint8)[:, 0]], 1, 2)


def test_abort_releases_nothing(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    _, receiver = pair
    waiter = Waiter(receiver.recv([payload(8)], 0, 1))

    receiver.abort()

    assert not waiter.is_done(0.3)
    release_blocked(receiver, 0)
    assert waiter.is_done(5)


def test_a_timed_out_receive_releases_every_blocked_call_on_both_ends(
    pair: tuple[pairs.PairGroup, pairs.PairGroup],
) -> None:
    sender, receiver = pair
    here = [Waiter(receiver.recv([payload(8)], 0, tag)) for tag in (1, 2)]
    there = Waiter(sender.send([payload(8)], 1, 3))
    started_s = time.monotonic()

    release_blocked(receiver, 0)

    assert all(waiter.is_done(5) and waiter.error for waiter in (*here, there))
    assert time.monotonic() - started_s < 2
    with pytest.raises(RuntimeError):
        sender.send([payload(8)], 1, 4).wait()


def test_the_sending_end_is_released_the_same_way(pair: tuple[pairs.PairGroup, pairs.PairGroup]) -> None:
    sender, _ = pair
    waiters = [Waiter(sender.send([payload(1 << 20)], 1, tag)) for tag in (1, 2)]

    release_blocked(sender, 1)

    assert all(waiter.is_done(5) and waiter.error for waiter in waiters)


def test_a_new_epoch_over_the_same_store_works_after_a_release(store: pairs.TCPStore) -> None:
    _, receiver = make_pair(store, "kvferry/p/d/0-0/1")
    release_blocked(receiver, 0)

    sender, receiver = make_pair(store, "kvferry/p/d/0-0/2")

    work = receiver.recv([payload(4, 0)], 0, 0)
    sender.send([payload(4)], 1, 0).wait()
    work.wait()


def test_join_keys_are_deleted_when_both_ends_are_open(store: pairs.TCPStore) -> None:
    make_pair(store)

    assert store.list_keys() == []


def test_all_pairs_of_a_device_share_one_port(store: pairs.TCPStore) -> None:
    before = listening()
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    other = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    with_devices = listening()
    groups = []

    def build(prefix: str, is_sender: bool) -> None:
        its = device if is_sender else other
        groups.append(pairs.open_gloo_group(store.clone(), prefix, is_sender=is_sender, device=its))

    threads = [threading.Thread(target=build, args=(f"kvferry/p{n}", side)) for n in range(3) for side in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert len(groups) == 6
    assert len(with_devices - before) == 2
    assert listening() == with_devices


def test_a_store_listens_only_where_it_was_bound() -> None:
    store, port = pairs.host_store("127.0.0.1", 0)

    assert [address for address, its in listening() if its == port] == ["127.0.0.1"]
    with pytest.raises(PortInUseError):
        pairs.host_store("127.0.0.1", port)
    with pytest.raises(ConfigError):
        pairs.host_store("192.0.2.1", 0)
    assert store.num_keys() == 0


PEER = """
    import sys, time
    import torch
    from kvferry_engine.transfer import pairs
    from torch.distributed import ProcessGroupGloo
    stores = pairs.Stores()
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    with stores.borrow(sys.argv[1]) as store:
        group = pairs.open_gloo_group(store, sys.argv[2], is_sender=True, device=device)
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_the_death_of_a_peer_process_is_an_error_at_once(tmp_path: Path) -> None:
    store, port = pairs.host_store("127.0.0.1", 0)
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(PEER))
    peer = subprocess.Popen(
        [sys.executable, str(script), f"127.0.0.1:{port}", PREFIX], stdout=subprocess.PIPE, text=True
    )
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    group = pairs.open_gloo_group(store.clone(), PREFIX, is_sender=False, device=device)
    assert peer.stdout is not None and peer.stdout.readline() == "open\n"
    waiter = Waiter(group.recv([payload(8)], 0, 1))
    time.sleep(0.2)
    assert waiter.is_alive()

    killed_s = time.monotonic()
    peer.kill()
    peer.wait()

    assert waiter.is_done(5)
    assert waiter.error
    assert time.monotonic() - killed_s < 2


@pytest.mark.slow
def test_a_timeout_of_the_constructor_also_ends_a_plain_wait(
    store: pairs.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PAIR_TIMEOUT", timedelta(seconds=2))
    _, receiver = make_pair(store)
    waiter = Waiter(receiver.recv([payload(8)], 0, 1))

    assert not waiter.is_done(1)
    assert waiter.is_done(5)
    assert waiter.error
