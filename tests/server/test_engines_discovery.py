"""Where addresses come from, when they are dialled and when they are forgotten."""

from __future__ import annotations

import threading

import pytest

from kvferry_server.engines.discovery import AddressBook, NameWatcher, SourceError, Sources, parse_sources, resolve
from server.kit_engine import FakeEngine, running, until

NAME = ("decode.ns.svc", 7070)


@pytest.mark.parametrize(
    ("text", "addresses", "names"),
    [
        ("", set(), set()),
        ("static:10.0.0.1:7070", {"10.0.0.1:7070"}, set()),
        ("static:10.0.0.1:7070,10.0.0.2:7071", {"10.0.0.1:7070", "10.0.0.2:7071"}, set()),
        ("static:localhost:7070", {"127.0.0.1:7070"}, set()),
        ("static:[::1]:7070", {"[::1]:7070"}, set()),
        ("static:engine-0:7070", set(), {("engine-0", 7070)}),
        ("dns:decode.ns.svc:7070", set(), {NAME}),
    ],
)
def test_sources_are_read(text: str, addresses: set[str], names: set[tuple[str, int]]) -> None:
    assert parse_sources(text) == Sources(frozenset(addresses), frozenset(names))


@pytest.mark.parametrize(
    "text", ["static", "static:", "k8s:x:1", "dns:name", "static:host:0", "static:host:x", "dns::7070"]
)
def test_wrong_sources_are_refused_with_the_text_given(text: str) -> None:
    with pytest.raises(SourceError, match=text):
        parse_sources(text)


def test_an_empty_answer_keeps_the_last_set() -> None:
    book = AddressBook(frozenset())
    book.answered(NAME, ["a:1", "b:1"])
    book.answered(NAME, [])
    assert book.wanted(frozenset(), 0.0) == {"a:1", "b:1"}


def test_an_unlisted_address_is_kept_while_connected_and_forgotten_30_s_later() -> None:
    book = AddressBook(frozenset())
    book.answered(NAME, ["a:1", "b:1"])
    book.wanted(frozenset({"a:1"}), 0.0)
    book.answered(NAME, ["b:1"])
    assert book.wanted(frozenset({"a:1"}), 1000.0) == {"a:1", "b:1"}
    assert book.wanted(frozenset(), 1001.0) == {"a:1", "b:1"}
    assert book.wanted(frozenset(), 1030.9) == {"a:1", "b:1"}
    assert book.wanted(frozenset(), 1031.0) == {"b:1"}


def test_an_address_that_returns_starts_anew() -> None:
    book = AddressBook(frozenset())
    book.answered(NAME, ["a:1"])
    book.wanted(frozenset(), 0.0)
    book.answered(NAME, ["b:1"])
    book.wanted(frozenset(), 1.0)
    book.answered(NAME, ["a:1", "b:1"])
    book.wanted(frozenset(), 20.0)
    book.answered(NAME, ["b:1"])
    assert "a:1" in book.wanted(frozenset(), 40.0)


def test_fixed_addresses_are_never_forgotten() -> None:
    book = AddressBook(frozenset({"a:1"}))
    assert book.wanted(frozenset(), 0.0) == book.wanted(frozenset(), 1e6) == {"a:1"}


def test_a_failing_resolver_reports_nothing_and_goes_on() -> None:
    answers: list[list[str]] = []
    enough = threading.Event()
    replies = iter([OSError("no such name"), ["a:1"], OSError("timeout")])

    def resolver(name: str, port: int) -> list[str]:
        reply = next(replies, [])
        if isinstance(reply, OSError):
            raise reply
        return reply

    def report(name: tuple[str, int], addresses: list[str]) -> None:
        answers.append(addresses)
        if len(answers) >= 4:
            enough.set()

    watcher = NameWatcher(NAME, report, resolver=resolver, interval_s=0.001)
    watcher.start()
    assert enough.wait(5.0)
    watcher.stop()
    assert answers[:4] == [[], ["a:1"], [], []]


def test_the_system_resolver_knows_this_machine() -> None:
    assert "127.0.0.1:7070" in resolve("127.0.0.1", 7070)


async def test_engines_found_by_name_are_dialled_and_a_live_one_outlives_its_record() -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    await first.start()
    await second.start()
    listed = [first.address]

    def resolver(name: str, port: int) -> list[str]:
        if not listed:
            raise OSError("resolver down")
        return list(listed)

    async with running(
        first, second, start=False, usable=1, sources=Sources(names=frozenset({NAME})), resolver=resolver
    ) as router:
        listed[:] = [second.address]
        await router.usable(2)
        listed.clear()
        router.core.fleet.review()
        assert len(router.core.registry.usable()) == 2
        await first.crash()
        await until(lambda: len(router.core.registry.usable()) == 1)
        assert first.address in router.core.registry.engines
