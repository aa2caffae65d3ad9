"""Stop strings across token borders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry_server.text.stop_strings import Cut, StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Return the texts shown per piece and the stop string that was found."""
    watcher = StopStrings(stops, include=include)
    shown: list[str] = []
    for piece in pieces:
        cut = watcher.push(piece)
        shown.append(cut.text)
        if cut.stop is not None:
            return shown, cut.stop
    return [*shown, watcher.flush()], None


def test_a_stop_across_pieces_shows_nothing_of_itself() -> None:
    assert run(["STOP"], ["ab S", "TO", "P cd"]) == (["ab ", "", ""], "STOP")


def test_what_turns_out_not_to_stop_is_shown_at_once() -> None:
    assert run(["STOP"], ["ab ST", "x"]) == (["ab ", "STx", ""], None)


def test_only_what_could_still_stop_is_held_back() -> None:
    assert StopStrings(["a very long stop string"], include=False).push("nothing") == Cut("nothing")


def test_included_stops_are_shown_and_hold_nothing_back() -> None:
    assert run(["STOP"], ["ab S", "TO", "P cd"], include=True) == (["ab S", "TO", "P"], "STOP")


def test_the_stop_that_completes_first_wins() -> None:
    assert run(["bcd", "c"], ["abcd"]) == (["ab"], "c")


def test_of_two_that_complete_together_the_longer_wins() -> None:
    assert run(["d", "bcd"], ["abcd"]) == (["a"], "bcd")


def test_repetitive_stops_are_found() -> None:
    assert run(["aab"], ["aa", "aa", "b"]) == (["", "aa", ""], "aab")


@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    width=st.integers(1, 4),
    include=st.booleans(),
)
def test_streams_agree_with_searching_the_whole_text(text: str, stops: list[str], width: int, include: bool) -> None:
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]

    shown, found = run(stops, pieces, include=include)

    if ends:
        end, minus_length, stop = min(ends)
        assert found == stop
        assert "".join(shown) == text[: end if include else end + minus_length]
    else:
        assert (found, "".join(shown)) == (None, text)
