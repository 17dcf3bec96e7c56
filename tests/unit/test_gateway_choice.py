"""However tokens are cut into frames, a choice shows the text of its ids up to the first stop string."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice import Choice, FastChoice, TextChoice
from services.gateway.formats import CompletionFormat, Entry, Envelope, Finished, Usage
from services.gateway.limits import TextOptions
from services.gateway.tokenizer import ModelCard, load_card
from shared.client import Open, OpenRequest, OpenSeq
from shared.wire import Answer, EndRow, Sampling
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return load_card(write_tiny_model(tmp_path_factory.mktemp("m") / "folder"), "m")


class Parts:
    """As much of an outlet as a choice touches."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.marked = False

    def mark(self) -> None:
        self.marked = True


class Owner:
    """Finishes a choice when its sequence ends or its stop string comes."""

    def __init__(self) -> None:
        self.finished: list[str] = []

    def first_token(self, choice: Choice) -> None:
        choice.first_at = 1.0

    def stopped_here(self, choice: Choice, seq: OpenSeq) -> None:
        self.finished.append("stop")
        choice.finish(Finished(choice.index, "stop"))

    def choice_ended(self, choice: Choice, seq: OpenSeq, end: EndRow) -> None:
        if not choice.done:
            choice.done = True
            self.finished.append(end.reason)
            choice.finish(Finished(choice.index, end.reason))

    def refused(self, request: OpenRequest, answer: Answer) -> None:
        raise AssertionError

    def usage_now(self) -> Usage:
        return Usage(0, 0)


class Written:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.text_: list[str] = []
        self.entries: list[Entry] = []

    def text(self, choice: TextChoice, text: str, entries: Sequence[Entry]) -> None:
        self.text_.append(text)
        self.entries += entries

    def finish(self, choice: TextChoice, end: Finished) -> None:
        pass


def run(choice: Choice, frames: list[list[int]]) -> None:
    """Deliver the frames as the mesh client does, then the end."""
    sampling = Sampling(max_tokens=10_000)
    request = OpenRequest(Open(request_id="r", prompt=[1], sampling=sampling, sinks=(choice,)), 1, 0.0)
    seq = request.seqs[1]
    for ids in frames:
        seq.accepted += ids
        choice.tokens(seq, ids)
    choice.ended(seq, EndRow(1, 1, "length", len(seq.accepted)))


def cut(text: str, stops: list[str]) -> str:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


ids = st.lists(st.integers(0, 599), min_size=1, max_size=12)
frames = st.lists(ids, min_size=1, max_size=10)
words = st.text(st.sampled_from("aehlot ,.日�"), min_size=1, max_size=3)


@given(frames=frames, stops=st.lists(words, max_size=3, unique=True), skip=st.booleans())
def test_the_text_ends_at_the_first_stop_string_wherever_frames_end(
    card: ModelCard, frames: list[list[int]], stops: list[str], skip: bool
) -> None:
    written, owner = Written(), Owner()
    options = TextOptions(stops=tuple(stops), skip_special=skip, token_ids=True)
    choice = TextChoice(0, owner, Parts(), card, options, written)  # type: ignore[arg-type]
    run(choice, frames)
    everything = [token for frame in frames for token in frame]
    whole = card.decode(everything, skip_special=skip)
    assert "".join(written.text_) == cut(whole, stops)
    assert len(owner.finished) == 1
    # Tokens are told in order, each once, up to the one that completed the stop string.
    told = [entry.token for entry in written.entries]
    assert told == everything[: choice.count]
    if cut(whole, stops) == whole and not any(stop in whole for stop in stops):
        assert choice.count == len(everything)


@given(frames=frames)
def test_the_fast_stream_says_the_same_as_a_full_decode_one_event_per_token(
    card: ModelCard, frames: list[list[int]]
) -> None:
    outlet, owner = Parts(), Owner()
    envelope = Envelope(
        id="x", created=1, model="m", card=card, usage_wanted=False, token_ids=False, logprobs=False
    )
    choice = FastChoice(0, owner, outlet, card, CompletionFormat(envelope))  # type: ignore[arg-type]
    run(choice, frames)
    events: list[Any] = [
        json.loads(line[6:]) for line in b"".join(outlet.parts).decode().split("\n\n") if line
    ]
    texts = [event["choices"][0]["text"] for event in events]
    everything = [token for frame in frames for token in frame]
    assert "".join(texts) == card.decode(everything, skip_special=True)
    assert len(everything) + 1 <= len(events) <= len(everything) + 2
    assert [e["choices"][0]["finish_reason"] for e in events].count("length") == 1


def test_the_stop_strings_own_text_is_included_only_when_asked(card: ModelCard) -> None:
    for include in (False, True):
        written = Written()
        options = TextOptions(stops=("lo",), include_stop=include)
        choice = TextChoice(0, Owner(), Parts(), card, options, written)  # type: ignore[arg-type]
        run(choice, [card.tokenizer.encode("hello there").ids])
        assert "".join(written.text_) == ("hello" if include else "hel")


def test_log_probabilities_that_are_missing_do_not_stop_the_text(card: ModelCard) -> None:
    written = Written()
    choice = TextChoice(0, Owner(), Parts(), card, TextOptions(logprobs=1), written)  # type: ignore[arg-type]
    run(choice, [card.tokenizer.encode("hello").ids])
    assert "".join(written.text_) == "hello"
    assert all(entry.chosen is None for entry in written.entries)


def test_the_tiny_model_has_ids_for_every_byte(card: ModelCard) -> None:
    assert {piece for piece in card.shown.pieces if len(piece) == 1} == {bytes([b]) for b in range(256)}
