"""Stop strings, against an oracle that reads one character at a time."""

import time

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stops import StopMatcher

letters = st.sampled_from("ab\n")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(text before the stop, the stop): the first that is complete, the longest of several at once."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return shown
    return shown + matcher.finish()


@given(pieces=st.lists(st.text(letters, max_size=5), max_size=12), stops=stop_lists)
def test_the_text_is_cut_as_if_it_came_by_single_characters(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = feed(matcher, pieces)
    assert (shown, matcher.matched) == oracle("".join(pieces), stops)


@given(pieces=st.lists(st.text(letters, max_size=5), max_size=12), stops=stop_lists)
def test_what_is_shown_never_ends_in_a_possible_beginning_of_a_stop(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            break
        everything = shown + matcher.held
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if everything.endswith(stop[:n])), default=0
        )
        assert len(matcher.held) == longest


def test_nothing_is_withheld_longer_than_needed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == "the "
    assert matcher.feed("N") == ""
    assert matcher.feed("X") == "ENX"


def test_hostile_strings_cost_a_step_per_character() -> None:
    matcher = StopMatcher(["a" * (1000 + n) + "b" for n in range(16)])
    began = time.perf_counter()
    for _ in range(2000):
        matcher.feed("aaaa")
    assert time.perf_counter() - began < 10.0
    assert len(matcher.held) == 1015
