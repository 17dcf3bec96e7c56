"""One choice of a response: from accepted token ids to what the client sees. These are the client's sinks.

`FastChoice` is the common stream: text and nothing else, a few appends per token. `TextChoice` knows
everything (stop strings, log-probabilities, ids, usage in every event); its writer knows where output goes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from services.gateway.detok import ByteDetokenizer
from services.gateway.formats import Entry, Finished, Format, Usage
from services.gateway.limits import TextOptions
from services.gateway.outlet import Outlet
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import ModelCard
from shared.client import OpenRequest, OpenSeq
from shared.wire import Answer, EndRow


class Owner(Protocol):
    """The request a choice belongs to."""

    def first_token(self, choice: "Choice") -> None: ...

    def stopped_here(self, choice: "Choice", seq: OpenSeq) -> None:
        """A stop string was found: no more tokens are wanted."""

    def choice_ended(self, choice: "Choice", seq: OpenSeq, end: EndRow) -> None: ...

    def refused(self, request: OpenRequest, answer: Answer) -> None: ...

    def usage_now(self) -> Usage: ...


class Choice(ABC):
    """What both kinds share."""

    __slots__ = ("count", "done", "first_at", "index", "last_at", "outlet", "owner")

    def __init__(self, index: int, owner: Owner, outlet: Outlet) -> None:
        self.index = index
        self.owner = owner
        self.outlet = outlet
        self.count = 0
        """Tokens accepted; after `done`, those the client is told of."""
        self.done = False
        self.first_at = 0.0
        self.last_at = 0.0

    def accepted(self, request: OpenRequest) -> None:  # noqa: B027 (a default, not a duty)
        """Nothing is shown before the first token, so that a later error can still choose the status."""

    def refused(self, request: OpenRequest, answer: Answer) -> None:
        self.owner.refused(request, answer)

    def ended(self, seq: OpenSeq, end: EndRow) -> None:
        if not self.done:
            self.flush_text(seq)
        self.owner.choice_ended(self, seq, end)

    @abstractmethod
    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None:
        """Show what these ids add."""

    @abstractmethod
    def flush_text(self, seq: OpenSeq) -> None:
        """Show what was held back; the sequence is over."""

    @abstractmethod
    def finish(self, end: Finished) -> None:
        """Show the end."""


class FastChoice(Choice):
    """Streams text of a byte-level vocabulary, special tokens hidden."""

    __slots__ = ("_detok", "_first", "_format", "_json", "_second")

    def __init__(self, index: int, owner: Owner, outlet: Outlet, card: ModelCard, format_: Format) -> None:
        super().__init__(index, owner, outlet)
        self._format = format_
        self._first, self._second = format_.fast_parts(index)
        self._json = card.hidden_json
        self._detok = ByteDetokenizer(card.hidden)

    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None:
        if self.done:
            return
        outlet = self.outlet
        if not self.count:
            self.owner.first_token(self)
            outlet.parts.append(self._format.opening(self.index, None))
        self.count += len(ids)
        parts, first, second = outlet.parts, self._first, self._second
        known, detok = self._json, self._detok
        for token in ids:
            if detok.open or (text := known.get(token)) is None:
                text = orjson.dumps(detok.push(token))
            parts += (first, text, second)
        if not outlet.marked:
            outlet.mark()

    def flush_text(self, seq: OpenSeq) -> None:
        if not self.count:
            self.owner.first_token(self)
            self.outlet.parts.append(self._format.opening(self.index, None))
        tail = self._detok.finish()
        if tail:
            self.outlet.parts += (self._first, orjson.dumps(tail), self._second)

    def finish(self, end: Finished) -> None:
        self.outlet.parts.append(self._format.finish(end, None))
        self.outlet.mark()


class Writer(Protocol):
    """Where the text of a `TextChoice` goes."""

    def text(self, choice: "TextChoice", text: str, entries: Sequence[Entry]) -> None: ...

    def finish(self, choice: "TextChoice", end: Finished) -> None: ...


class TextChoice(Choice):
    """Everything a client can ask to see."""

    __slots__ = (
        "_begin",
        "_card",
        "_detok",
        "_entries",
        "_offset",
        "_opening",
        "_options",
        "_stops",
        "_writer",
        "stop_reason",
    )

    def __init__(
        self, index: int, owner: Owner, outlet: Outlet, card: ModelCard, options: TextOptions, writer: Writer
    ) -> None:
        super().__init__(index, owner, outlet)
        self._card = card
        self._options = options
        self._writer = writer
        self._detok = card.detokenizer(options.skip_special)
        self._stops = StopMatcher(options.stops) if options.stops else None
        self._entries: list[Entry] = []
        """Of tokens whose text is withheld."""
        self._offset = 0
        """Characters of text so far, withheld ones included."""
        self._begin: Callable[[], None] | None = None
        self._opening: Callable[[OpenSeq], tuple[str, list[Entry]]] | None = None
        self.stop_reason: str | int | None = None

    def begins_with(self, begin: Callable[[], None]) -> None:
        """Called once before anything of this choice is shown."""
        self._begin = begin

    def opens_with(self, opening: Callable[[OpenSeq], tuple[str, list[Entry]]]) -> None:
        """Text shown before the first token (an echoed prompt), made when that token is there."""
        self._opening = opening

    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None:
        if self.done:
            return
        self._open(seq)
        base = len(seq.accepted) - len(ids)
        for position, token in enumerate(ids, base):
            self._token(seq, position, token)
            if self.done:
                break

    def flush_text(self, seq: OpenSeq) -> None:
        self._open(seq)
        tail = self._detok.finish()
        stops = self._stops
        if stops is not None and (tail or stops.held):
            if self._searched(self.count):
                tail = stops.feed(tail)
                if stops.matched is not None:
                    self._stopped(seq, tail)
                    return
            tail += stops.finish()
        if tail or self._entries:
            self._show(tail)

    def finish(self, end: Finished) -> None:
        end.stop_reason = self.stop_reason if self.stop_reason is not None else end.stop_reason
        self._writer.finish(self, end)

    def _open(self, seq: OpenSeq) -> None:
        if self.first_at:
            return
        self.owner.first_token(self)
        if self._begin is not None:
            self._begin()
        if self._opening is not None:
            text, entries = self._opening(seq)
            self._offset = len(text)
            self._writer.text(self, text, entries)

    def _token(self, seq: OpenSeq, position: int, token: int) -> None:
        self.count += 1
        options = self._options
        text = "" if token in options.hidden_ids else self._detok.push(token)
        if options.logprobs is not None:
            known = position < len(seq.logprobs)
            chosen, top = seq.logprobs[position] if known else (None, ())
            self._entries.append(Entry(token, chosen, top[: options.logprobs], self._offset))
        elif options.token_ids:
            self._entries.append(Entry(token, None, (), self._offset))
        self._offset += len(text)
        stops = self._stops
        if stops is None or not self._searched(self.count):
            self._show(text)
            return
        shown = stops.feed(text)
        if stops.matched is not None:
            self._stopped(seq, shown)
        elif not stops.held:
            self._show(shown)
        elif shown:
            self._writer.text(self, shown, ())

    def _searched(self, count: int) -> bool:
        return count > self._options.min_tokens

    def _show(self, text: str) -> None:
        entries, self._entries = self._entries, []
        self._writer.text(self, text, entries)

    def _stopped(self, seq: OpenSeq, shown: str) -> None:
        """`shown` is the last text before the stop string."""
        assert self._stops is not None
        self.stop_reason = self._stops.matched
        if self._options.include_stop:
            shown += self._stops.matched or ""
        self._show(shown)
        self.done = True
        self.owner.stopped_here(self, seq)


class StreamWriter:
    """Text as events, at once."""

    def __init__(self, format_: Format, outlet: Outlet, usage: Callable[[], Usage] | None) -> None:
        self._format = format_
        self._outlet = outlet
        self._usage = usage
        """Called for every event where the client wants usage in each."""

    def text(self, choice: TextChoice, text: str, entries: Sequence[Entry]) -> None:
        usage = None if self._usage is None else self._usage()
        self._outlet.parts.append(self._format.delta(choice.index, text, entries, usage))
        self._outlet.mark()

    def finish(self, choice: TextChoice, end: Finished) -> None:
        usage = None if self._usage is None else self._usage()
        self._outlet.parts.append(self._format.finish(end, usage))
        self._outlet.mark()


class CollectingWriter:
    """Text kept until the whole response is there. One per choice."""

    def __init__(self, with_ids: bool, prompt_ids: list[int] | None) -> None:
        self._texts: list[str] = []
        self._entries: list[Entry] = []
        self._with_ids = with_ids
        self._prompt_ids = prompt_ids
        self.finished: Finished | None = None

    def text(self, choice: TextChoice, text: str, entries: Sequence[Entry]) -> None:
        self._texts.append(text)
        self._entries += entries

    def finish(self, choice: TextChoice, end: Finished) -> None:
        end.text = "".join(self._texts)
        end.entries = self._entries
        if self._with_ids:
            end.prompt_ids = self._prompt_ids
        self.finished = end
