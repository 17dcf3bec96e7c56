"""Drawing the next token of every row where each rank has the logits of its own vocabulary rows only.

Ranks tell each other what they found in their slices (`sharded_sampling_looks.py`), not the slices, in one
message for all rows of a step; from these every rank decides the same (`sharded_sampling_merge.py`). Tokens
are those that `sampler.sample` gives for the joined logits. A second message is sent only if a row needs it:

- nothing filters the row: the rank in whose slice the uniform falls looks up the id and tells it;
- the log-probability of a token is asked for whose logit was shifted before it was drawn;
- the candidates do not prove what the filters keep: that row's slices are joined, as a last resort, and one
  rank draws from it and tells.

Which of these happens follows from the first message, so that all ranks send the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.batch import RaggedBatch, prompt_spans
from services.worker.engine.draw import draw_rows
from services.worker.engine.native.decoder import Kernels
from services.worker.engine.sampler import SampleRow, adjust
from services.worker.engine.sharded_sampling_logprobs import best, log_sums, split
from services.worker.engine.sharded_sampling_looks import (
    CANDIDATE,
    FINITE,
    FOUND,
    INFINITE,
    LOOK,
    NO_NUMBER,
    looks_of,
)
from services.worker.engine.sharded_sampling_merge import Offers, decide_of, exp
from services.worker.engine.sharded_sampling_wishes import Traffic, Wishes
from services.worker.step import I32, NOT_FINITE, PromptLogprobs, SlotArrays, StepInput, TokenLogprobs

F32 = NDArray[np.float32]
BYTES = NDArray[np.uint8]
Gather = Callable[[BYTES], BYTES]
"""`Collective.gather`."""

_MOST_BYTES = 1 << 20
"""Of one message about a prompt's positions, and of one that joins rows, unless a single one is longer."""

_ANSWER = np.dtype([("id", "i4"), ("raw", "f4")])
_NOTHING = np.empty(0, np.uint8)
_MINE = np.dtype([("first", "i8"), ("own", "i8"), ("vocab", "i8")])


class RanksDiverged(RuntimeError):
    """Ranks are not at the same step, or drew different tokens before: what they compute is worthless."""


@dataclass
class _Drawn:
    """What is known of the rows of a step after the first message."""

    tokens: NDArray[np.int64]
    raw: F32
    """Logit of the token before anything shifted it; NaN if not known."""
    finite: NDArray[np.bool_]
    top: F32
    mass: NDArray[np.float64]
    """[ranks, rows] sum of exp((v - top) / temperature)."""
    ask_id: list[int] = field(default_factory=list)
    ask_raw: list[int] = field(default_factory=list)
    join: list[int] = field(default_factory=list)


class ShardedSampler:
    """One rank's part in sampling; all ranks call the same methods with the same rows.

    The rank has vocabulary rows [first, first + own) of `vocab`; ranks' rows follow each other. Construction
    exchanges a message and raises ValueError if they do not. All have `kernels`, or none.
    """

    def __init__(
        self, first: int, own: int, vocab: int, rank: int, size: int, gather: Gather, kernels: Kernels | None
    ) -> None:
        self._first, self._own, self._vocab, self._rank, self._size = first, own, vocab, rank, size
        self._gather = gather
        self.traffic = Traffic()
        self.use(kernels)
        mine = np.array([(first, own, vocab)], _MINE)
        every = gather(mine.view(np.uint8)).view(_MINE)[:, 0]
        self._starts, self._owns = every["first"], every["own"]
        ends = np.cumsum(self._owns)
        follow = (self._starts == ends - self._owns).all() and (every["vocab"] == ends[-1]).all()
        if not follow or (self._owns < 1).any():
            parts = ", ".join(f"[{a}, {a + n})" for a, n in zip(self._starts, self._owns))
            raise ValueError(f"ranks hold vocabulary rows {parts}: not [0, {vocab}) in order, some on each")
        self._widest = int(self._owns.max())

    def use(self, kernels: Kernels | None) -> None:
        """Look with another team from now on."""
        self._look, self._merge = looks_of(kernels), decide_of(kernels)
        self._draw = draw_rows if kernels is None else kernels.draw

    def sample(
        self, logits: torch.Tensor | F32, rows: Sequence[SampleRow], header: bytes = b""
    ) -> tuple[I32, dict[int, TokenLogprobs]]:
        """As `sampler.sample` of the joined logits, the same on all ranks; rows of `logits` [rows, own] are
        overwritten where their sampling changes them.

        `header` must be the same on all ranks, and travels with the first message. Raises `RanksDiverged` if
        it is not, and `GroupLost`.
        """
        values = logits.numpy() if isinstance(logits, torch.Tensor) else logits
        wishes = Wishes.of(rows, self._vocab)
        before = self._kept_raw(values, wishes)
        found, raw_found, listed, raw_listed = self._look_at(values, before, rows, wishes)
        parts = [np.frombuffer(header, np.uint8), found, raw_found, listed, raw_listed]
        told = self._exchange(parts)
        self._check(told[0])
        found, raw_found, listed, raw_listed = told[1:]
        drawn = self._decide(wishes, found, listed)
        self._second(values, before, wishes, drawn, found)
        self._count(wishes, drawn, header)
        tokens = np.where(drawn.finite, drawn.tokens, NOT_FINITE).astype(np.int32)
        logprobs = self._logprobs(wishes, drawn, raw_found, raw_listed)
        return tokens, logprobs

    def prompt_logprobs(
        self, logits: torch.Tensor | F32, batch: RaggedBatch, step: StepInput, slots: SlotArrays
    ) -> dict[int, PromptLogprobs]:
        """Of the prompt tokens that the step's rows predict, by row; `logits` [len(batch.logit_tokens), own].

        One message for all of them, several where it would be long. Raises `GroupLost`.
        """
        values = logits.numpy() if isinstance(logits, torch.Tensor) else logits
        spans = prompt_spans(batch, step, slots)
        places: list[int] = []
        targets: list[int] = []
        counts: list[int] = []
        for span in spans:
            positions = span.stop - span.first
            places += range(span.at, span.at + positions)
            targets += slots.tokens[span.slot, span.first : span.stop].tolist()
            counts += [span.count] * positions
        scored = self.score(values, places, targets, counts)
        result: dict[int, PromptLogprobs] = {}
        for span in spans:
            positions = span.stop - span.first
            mine, scored = scored[:positions], scored[positions:]
            result[span.row] = PromptLogprobs(span.first, [one for one, _ in mine], [top for _, top in mine])
        return result

    def score(
        self, values: F32, places: Sequence[int], targets: Sequence[int], counts: Sequence[int]
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """As `sampler.top_logprobs`: of row places[i] of `values` [rows, own], the log-probability of id
        targets[i] and the best counts[i]."""
        result: list[tuple[float, list[tuple[int, float]]]] = []
        tops = np.minimum(np.maximum(counts, 0), self._vocab).astype(np.int64)
        sizes = np.cumsum(FOUND.itemsize + tops * CANDIDATE.itemsize) // _MOST_BYTES
        for part in np.split(np.arange(len(tops)), np.flatnonzero(np.diff(sizes)) + 1):
            if len(part):
                result += self._score(values, np.asarray(places)[part], np.asarray(targets)[part], tops[part])
        return result

    def _score(
        self, values: F32, places: NDArray[np.int64], targets: NDArray[np.int64], tops: NDArray[np.int64]
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        found, listed = self._ask(values, places, np.ones(len(places)), tops)
        mine = np.flatnonzero((targets >= self._first) & (targets < self._first + self._own))
        found["raw"][mine] = values[places[mine], targets[mine] - self._first]
        found, listed = self._exchange([found, listed])
        owner = np.searchsorted(self._starts + self._owns, targets, side="right")
        chosen = found["raw"][owner, np.arange(len(targets))]
        lse = log_sums(found)
        self.traffic.messages_before += 3
        self.traffic.bytes_before += 4 * self._widest * len(places)
        return [
            (float(value - norm), best(part, norm, count))
            for value, norm, count, part in zip(chosen, lse, tops.tolist(), split(listed, tops))
        ]

    def _kept_raw(self, values: F32, wishes: Wishes) -> dict[int, F32]:
        """The logits of rows whose log-probabilities are asked for and which will be shifted."""
        return {i: values[i].copy() for i in wishes.wants if wishes.shifted[i]}

    def _look_at(
        self, values: F32, before: dict[int, F32], rows: Sequence[SampleRow], wishes: Wishes
    ) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
        """(`FOUND` of every row shifted, of the rows `wants` as they are, and the candidates of both)."""
        every = np.arange(len(rows))
        raw_found, raw_listed = self._ask(
            values, np.array(wishes.wants, np.int64), np.ones(len(wishes.wants)), wishes.tops
        )
        shifted = np.flatnonzero(wishes.shifted)
        if len(shifted):
            plain, _ = self._ask(values, shifted, np.zeros(len(shifted)), np.zeros(len(shifted), np.int64))
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                for i, state in zip(shifted.tolist(), plain["state"].tolist()):
                    if state == FINITE:
                        adjust(values[i], self._own_part(rows[i]))
        temperature = np.where(wishes.summed, wishes.draws["temperature"], 0.0)
        found, listed = self._ask(values, every, temperature, wishes.listed)
        if len(shifted):
            found["state"][shifted[plain["state"] != FINITE]] = NO_NUMBER
            for i, raw in before.items():
                found["raw"][i] = raw[found["id"][i] - self._first]
        return found, raw_found, listed, raw_listed

    def _ask(
        self,
        values: F32,
        which: NDArray[np.int64],
        temperature: NDArray[np.float64],
        counts: NDArray[np.int64],
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        if not len(which):
            return np.empty(0, FOUND), np.empty(0, CANDIDATE)
        looks = np.empty(len(which), LOOK)
        looks["row"], looks["temperature"], looks["count"] = which, temperature, counts
        looks["at"] = np.cumsum(counts) - counts
        return self._look(values, looks, self._first, int(counts.sum()))

    def _own_part(self, row: SampleRow) -> SampleRow:
        """`row` with the ids of this rank only, counted from its first."""
        s = row.sampling
        prompt = self._mine(row.history[: row.prompt_len])
        output = self._mine(row.history[row.prompt_len :])
        masked = s.stop_token_ids if s.min_tokens > row.index else ()
        sampling = msgspec.structs.replace(
            s,
            stop_token_ids=tuple(self._mine(np.array(masked, np.int64)).tolist()),
            min_tokens=len(output) + 1,
            logit_bias=tuple(
                (i - self._first, bias) for i, bias in s.logit_bias if 0 <= i - self._first < self._own
            ),
        )
        return replace(
            row, sampling=sampling, history=np.concatenate((prompt, output)), prompt_len=len(prompt)
        )

    def _mine(self, ids: NDArray[np.integer]) -> I32:
        local = ids - self._first
        return local[(local >= 0) & (local < self._own)].astype(np.int32)

    def _exchange(self, parts: Sequence[NDArray]) -> list[NDArray]:
        """[size, ...] of each part: what all ranks have, in one message."""
        mine = np.concatenate([part.view(np.uint8) for part in parts if part.nbytes] or [_NOTHING])
        every = self._gather(mine)
        self.traffic.messages_now += 1
        self.traffic.bytes_now += len(mine)
        told: list[NDArray] = []
        begin = 0
        for part in parts:
            end = begin + part.nbytes
            told.append(every[:, begin:end].copy().view(part.dtype) if part.nbytes else _none(part, every))
            begin = end
        return told

    def _check(self, headers: BYTES) -> None:
        if (headers != headers[0]).any():
            differ = np.flatnonzero((headers != headers[0]).any(axis=1))
            told = ", ".join(f"rank {r}: {row.tobytes().hex()}" for r, row in enumerate(headers))
            raise RanksDiverged(
                f"rank {differ[0]} is not where rank 0 is ({told}); the instance must be started anew"
            )

    def _decide(self, wishes: Wishes, found: NDArray[np.void], listed: NDArray[np.void]) -> _Drawn:
        rows = np.arange(found.shape[1])
        values = np.where(found["state"] == NO_NUMBER, -np.inf, found["value"])
        winner, top = values.argmax(axis=0), values.max(axis=0)
        sound = (found["state"] == FINITE) | (wishes.shifted & (found["state"] == INFINITE))
        finite = sound.all(axis=0) & np.isfinite(top)
        tokens, raw = found["id"][winner, rows].astype(np.int64), found["raw"][winner, rows]
        drawn = _Drawn(tokens, raw, finite, top, np.zeros(found.shape))
        here = wishes.drawn & finite
        if not here.any():
            return drawn
        if wishes.summed.any():
            temperature = np.where(wishes.summed, wishes.draws["temperature"], 1.0)
            below = np.where(np.isfinite(values) & finite, values - np.where(finite, top, 0.0), -np.inf)
            drawn.mass = found["sum"] * exp(below.astype(np.float64) / temperature)
        drawn.ask_id = np.flatnonzero(here & ~wishes.filtered).tolist()
        drawn.join = np.flatnonzero(here & wishes.filtered & (wishes.listed == 0)).tolist()
        which = np.flatnonzero(here & wishes.filtered & (wishes.listed > 0))
        if len(which):
            self._decide_filtered(wishes, drawn, which, listed)
        return drawn

    def _decide_filtered(
        self, wishes: Wishes, drawn: _Drawn, which: NDArray[np.int64], listed: NDArray[np.void]
    ) -> None:
        offers = Offers(
            listed=listed,
            at=(np.cumsum(wishes.listed) - wishes.listed)[which],
            counts=wishes.listed[which],
            owns=self._owns,
            top=drawn.top[which],
            mass=drawn.mass.cumsum(axis=0)[-1, which],
            draws=wishes.draws[which],
        )
        verdicts = self._merge(offers, self._vocab)
        proved = verdicts["proved"]
        decided = which[proved]
        drawn.tokens[decided], drawn.raw[decided] = verdicts["token"][proved], verdicts["value"][proved]
        drawn.join += which[~proved].tolist()
        drawn.ask_raw = decided[wishes.shifted[decided] & np.isin(decided, wishes.wants)].tolist()

    def _second(
        self,
        values: F32,
        before: dict[int, F32],
        wishes: Wishes,
        drawn: _Drawn,
        found: NDArray[np.void],
    ) -> None:
        """The messages after the first, if any row needs them, and what follows from them."""
        asked = drawn.ask_id + drawn.join + drawn.ask_raw
        if not asked:
            return
        answers = _no_answers(len(asked))
        if drawn.ask_id:
            self._pick(values, before, wishes, drawn, found, answers[: len(drawn.ask_id)])
        if drawn.join:
            self._join(values, wishes, drawn, answers[len(drawn.ask_id) :][: len(drawn.join)])
        self._tell_raw(before, drawn, drawn.ask_raw, answers[len(drawn.ask_id) + len(drawn.join) :])
        self._answer(drawn, asked, answers)
        if late := [i for i in drawn.join if i in before]:
            answers = _no_answers(len(late))
            self._tell_raw(before, drawn, late, answers)
            self._answer(drawn, late, answers)

    def _tell_raw(
        self, before: dict[int, F32], drawn: _Drawn, which: Sequence[int], answers: NDArray[np.void]
    ) -> None:
        """Fill in the logit, as it was, of each token of `which` that is this rank's."""
        for at, i in enumerate(which):
            if 0 <= (own := int(drawn.tokens[i]) - self._first) < self._own:
                answers[at] = drawn.tokens[i], before[i][own]

    def _answer(self, drawn: _Drawn, asked: list[int], answers: NDArray[np.void]) -> None:
        """Exchange `answers` about rows `asked`: each is known to one rank."""
        (every,) = self._exchange([answers])
        told = every[(every["id"] >= 0).argmax(axis=0), np.arange(len(asked))]
        drawn.tokens[asked], drawn.raw[asked] = told["id"], told["raw"]

    def _pick(
        self,
        values: F32,
        before: dict[int, F32],
        wishes: Wishes,
        drawn: _Drawn,
        found: NDArray[np.void],
        answers: NDArray[np.void],
    ) -> None:
        """Fill in the id of each row `ask_id` whose uniform falls into this rank's slice."""
        which = np.array(drawn.ask_id, np.int64)
        ends = drawn.mass[:, which].cumsum(axis=0)
        target = wishes.draws["uniform"][which] * ends[-1]
        last = self._size - 1 - (drawn.mass[::-1, which] > 0.0).argmax(axis=0)
        owner = np.minimum((ends <= target).sum(axis=0), last)
        mine = np.flatnonzero(owner == self._rank)
        if not len(mine):
            return
        draws = wishes.draws[which[mine]]
        mass = drawn.mass[self._rank, which[mine]]
        within = (target[mine] - (ends[self._rank, mine] - mass)) / mass
        draws["uniform"] = np.clip(within, 0.0, 1.0 - 2.0**-53)
        draws["largest"] = found["id"][self._rank, which[mine]] - self._first
        picked = self._draw(values, draws)
        for at, i, own in zip(mine.tolist(), which[mine].tolist(), picked.tolist()):
            answers[at] = self._first + own, before.get(i, values[i])[own]

    def _join(self, values: F32, wishes: Wishes, drawn: _Drawn, answers: NDArray[np.void]) -> None:
        """Join the rows `join` and draw from them: each rank from every size-th, while others do theirs.

        Drawn once and told, a token cannot differ between CPUs that round differently.
        """
        each = max(_MOST_BYTES // (4 * self._widest), 1)
        for begin in range(0, len(drawn.join), each):
            which = drawn.join[begin : begin + each]
            mine = np.zeros((len(which), self._widest), np.float32)
            mine[:, : self._own] = values[which]
            (every,) = self._exchange([mine.reshape(-1)])
            every = every.reshape(self._size, len(which), self._widest)
            own = range((self._rank - begin) % self._size, len(which), self._size)
            if not own:
                continue
            parts = [part[own, :width] for part, width in zip(every, self._owns.tolist())]
            draws = wishes.draws[[which[at] for at in own]]
            draws["row"] = np.arange(len(own))
            draws["largest"] = drawn.tokens[[which[at] for at in own]]
            whole = np.concatenate(parts, axis=1)
            for at, token, row in zip(own, self._draw(whole, draws).tolist(), whole):
                answers[begin + at] = token, row[token]

    def _logprobs(
        self, wishes: Wishes, drawn: _Drawn, found: NDArray[np.void], listed: NDArray[np.void]
    ) -> dict[int, TokenLogprobs]:
        if not wishes.wants:
            return {}
        lse = log_sums(found)
        parts = zip(wishes.wants, lse, wishes.tops.tolist(), split(listed, wishes.tops))
        return {
            i: TokenLogprobs(float(drawn.raw[i] - norm), best(part, norm, count))
            for i, norm, count, part in parts
            if drawn.finite[i]
        }

    def _count(self, wishes: Wishes, drawn: _Drawn, header: bytes) -> None:
        t, rows = self.traffic, len(wishes.draws)
        kinds = (
            *(header, True, wishes.summed.any(), wishes.listed.any(), wishes.wants, wishes.tops.any()),
            *(drawn.ask_id, drawn.ask_raw, drawn.join),
        )
        t.steps += 1
        t.messages_before += sum(map(bool, kinds))
        t.bytes_before += len(header) + rows * 4 * self._widest
        t.rows += rows
        t.joined += len(drawn.join)


def _no_answers(count: int) -> NDArray[np.void]:
    answers = np.empty(count, _ANSWER)
    answers["id"], answers["raw"] = -1, np.nan
    return answers


def _none(part: NDArray, every: BYTES) -> NDArray:
    return np.empty((len(every), 0), part.dtype)
