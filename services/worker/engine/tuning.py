"""How a group's passes communicate: measured when the group is formed, corrected by what its steps take.

Everything here runs on all ranks at once, with the same calls; what is decided is decided by what rank 0
measured, or by what all have told. Algorithms of sums are chosen by message size (`CrossoverTable`), and a
step's tokens are cut into chunks by what computing and the link cost (`Planner`).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from services.worker.collective.port import Collective
from services.worker.engine.batch import one_sequence
from services.worker.engine.config import ModelConfig
from services.worker.engine.crossing import Watched, crossovers
from services.worker.engine.kvcache import KvCache
from services.worker.engine.native.decoder import NativeDecoder
from services.worker.parallel.advice import Advice, Layer, Scaled, advise
from services.worker.parallel.crossover import (
    CrossoverTable,
    Line,
)
from services.worker.parallel.drift import Drift
from services.worker.parallel.overlap import Corrector, Costs, Link, Measured, Planner, Work, simulate
from services.worker.parallel.share import LayerShare, Shares, StepShare
from services.worker.step import I32

log = logging.getLogger(__name__)

_ROWS = (1, 24, 192)
"""Tokens of the passes that tell what computing costs: one, few, many."""
_REPEATS = 3
_MESSAGE_S = 3e-6
"""Computing time of a message, as a start: corrected by what steps take."""
_LONE_STEPS = 32
"""Steps alike, of one chunk each, from which it is told what their messages take."""
_TOLD_AT = 0.05
"""A correction that changes a cost by this share is told to all ranks."""
_ADVISE_AFTER = 8
"""Steps of a kind before anything is concluded from them."""
_LEARN_FROM = 16
"""Tokens of the smallest step that costs are corrected by: single tokens have nothing to plan."""

_ATTEND = ("norm", "qkv", "rope and KV write", "attention", "out")
_FEED = ("gate and up", "down")


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one layer's two halves for a number of tokens, on the slowest rank."""

    attend: float
    feed: float


def measure_stages(decoder: NativeDecoder, kv: KvCache, collective: Collective) -> dict[int, StageTimes]:
    """What half a layer takes to compute, waiting left out. Writes into block 0 onwards."""
    found = {}
    layer = min(1, decoder.config.layers - 1)
    for rows in _ROWS:
        rows = min(rows, kv.blocks * kv.block_tokens, decoder.config.max_len)
        batch = one_sequence(0, rows, kv.block_tokens)
        one = np.array([0, rows], np.int32)
        halves = []
        for _ in range(_REPEATS + 1):
            before = decoder.spent()
            decoder.forward_layers(batch, layer, layer + 1, one)
            spent = {name: seconds - before[name] for name, seconds in decoder.spent().items()}
            halves.append([sum(spent[name] for name in names) for names in (_ATTEND, _FEED)])
        mine = np.median(np.array(halves[1:]), axis=0)
        told = collective.gather(mine.view(np.uint8)).view(np.float64)
        found[rows] = StageTimes(*(float(of) for of in told.max(axis=0)))
    return found


def work_of(times: dict[int, float]) -> Work:
    """The cost of a stage's chunk from its seconds by rows: of one, of few, of many."""
    rows = sorted(times)
    if len(rows) < 3:
        return Work(0.0, times[rows[-1]] / rows[-1], times[rows[0]])
    one, few, many = rows
    row_s = max((times[many] - times[few]) / (many - few), 0.1 * times[many] / many)
    return Work(max(0.0, times[many] - row_s * many), row_s, times[one])


def link_of(table: CrossoverTable | None, row_bytes: int, most_bytes: int) -> Link:
    """What a message takes of the link, as a line through chunks of few and of many tokens."""
    if table is None:
        return Link(0.0, 0.0)
    few, many = min(16 * row_bytes, most_bytes // 2), most_bytes
    slope = max(0.0, (table.predict(many) - table.predict(few)) / max(1, many - few))
    return Link.of(Line(max(0.0, table.predict(few) - slope * few), slope))


class Tuning:
    """The group's side of an executor: plans its steps, learns from them, tells all ranks what changes."""

    def __init__(
        self,
        collective: Collective,
        decoder: NativeDecoder,
        kv: KvCache,
        config: ModelConfig,
        most_tokens: int,
        depends_on: dict[str, object],
    ) -> None:
        self._collective, self._decoder = collective, decoder
        self._config = config
        self._row_bytes = 4 * config.hidden
        self._most_bytes = most_tokens * self._row_bytes
        self._depends_on = depends_on
        self.table = crossovers(collective, self._most_bytes, depends_on)
        stages = measure_stages(decoder, kv, collective)
        self._costs = Costs(
            layers=config.layers,
            attend=work_of({rows: times.attend for rows, times in stages.items()}),
            feed=work_of({rows: times.feed for rows, times in stages.items()}),
            link=link_of(self.table, self._row_bytes, self._most_bytes),
            row_bytes=self._row_bytes,
            message_s=_MESSAGE_S,
        )
        self._planner = Planner(self._costs)
        self._corrector = Corrector(self._costs)
        self._news: dict[str, Any] | None = None
        self.shares = Shares(config.layers)
        self._before = decoder.spent()
        self._busy_s = 0.0
        self._asked = False
        self._alike = self._steps = 0
        self._watch_anew()
        decoder.plan = self.plan

    @property
    def costs(self) -> Costs:
        """As corrected so far."""
        return self._planner.costs

    def plan(self, tokens: int) -> I32:
        """`ChunkPlan` of this group's steps."""
        return np.array(self._planner.plan(tokens), np.int32)

    def observe(self, tokens: int) -> None:
        """A step of so many tokens was computed. On rank 0, costs are corrected by it."""
        spent = self._decoder.spent()
        taken = {name: seconds - self._before[name] for name, seconds in spent.items()}
        self._before = spent
        exposed_s = taken.pop("exposed communication")
        compute_s = sum(taken.values())
        plan = self._planner.plan(tokens)
        self.shares.add(StepShare(tokens, compute_s, self._alone_s(plan), exposed_s, taken["norm"]))
        if self._collective.rank == 0 and tokens >= _LEARN_FROM:
            self._corrector.observe(Measured(plan, compute_s - taken["head"], exposed_s, self._wire_s()))
            corrected = self._corrector.costs
            if _differ(corrected, self._planner.costs):
                self._news = (self._news or {}) | {"costs": corrected.to_plain()}
        self._watch(tokens, len(plan) == 2)

    def _wire_s(self) -> float | None:
        """Seconds the links were taken since the last call; None if nothing went over any."""
        if not isinstance(self._collective, Watched):
            return None
        before, self._busy_s = self._busy_s, self._collective.busy_s()
        return self._busy_s - before or None

    def _watch(self, tokens: int, lone: bool) -> None:
        """Notice if messages take other times than when they were measured.

        Told by steps that are all alike and whose messages are not under way together; all ranks count the
        same steps and tell each other the shortest times they saw, of which the longest is believed.
        """
        if self._drift is None or self.table is None or not isinstance(self._collective, Watched):
            return
        if not lone or tokens != self._alike:
            self._alike, self._steps = tokens, 0
            self._collective.drift()  # begins anew
            return
        self._steps += 1
        if self._steps < _LONE_STEPS:
            return
        self._steps = 0
        size = tokens * self._row_bytes
        kind = size.bit_length() - 1
        fastest = self._collective.drift().get(self.table.choose(size), {})
        mine = np.array([fastest.get(kind, 0.0)])
        seconds = float(self._collective.gather(mine.view(np.uint8)).view(np.float64).max())
        if self._collective.rank or not seconds:
            return
        # In a pass a message takes another time than when it was timed by itself: what counts is the change.
        usual = self._usual.setdefault(kind, seconds / self.table.predict(size))
        messages = _LONE_STEPS * 2 * self._costs.layers
        self._drift.observe(size, seconds / usual, time.monotonic(), messages)
        if (drifted := self._drift.drifted) is not None and not self._asked:
            log.warning("%s", drifted.describe())
            self._asked = True
            self._news = (self._news or {}) | {"measure": "crossovers"}

    def _watch_anew(self) -> None:
        self._drift = None if self.table is None else Drift(self.table)
        self._usual: dict[int, float] = {}
        self._alike = self._steps = 0
        self._asked = False

    def _alone_s(self, plan: Sequence[int]) -> float:
        """What the messages of a step take if nothing is computed meanwhile."""
        if self.table is None:
            return 0.0
        sizes = [(stop - start) * self._row_bytes for start, stop in pairwise(plan)]
        return (1 + 2 * self._costs.layers) * sum(self.table.predict(size) for size in sizes)

    def news(self) -> dict[str, Any] | None:
        """What all ranks are to be told before the next step."""
        news, self._news = self._news, None
        return news

    def tune(self, state: dict[str, Any]) -> None:
        """What rank 0 had to tell."""
        if "costs" in state:
            self._planner.use(Costs.from_plain(state["costs"]))
        if "measure" in state:
            self.measure_anew()

    def describe(self) -> dict[str, Any]:
        """All that is known of how this group communicates, as plain data: for `hortator profile comm`."""
        known: dict[str, Any] = {"costs": self.costs.to_plain(), "link": self._depends_on}
        if self.table is not None:
            known |= self.table.to_plain()
            known["fits"] = {name: msgspec.to_builtins(fit) for name, fit in self.table.fits.items()}
        known["recent"] = {kind: layer.to_plain() for kind, layer in self.shares.recent.items()}
        return known

    def report(self) -> dict[str, Any]:
        """What `status` and metrics tell: totals in seconds, and a layer of recent steps."""
        shares = self.shares
        return {
            "tp": self._collective.size,
            "layers": self._costs.layers,
            "compute_s": shares.compute_s,
            "communication_s": shares.communication_s,
            "exposed_communication_s": shares.exposed_s,
            "recent": {kind: layer.to_plain() for kind, layer in shares.recent.items()},
            "advice": [
                f"{kind} steps: {advice.sentence}"
                for kind, layer in shares.recent.items()
                if (advice := self.advice(layer)) is not None
            ],
        }

    def advice(self, recent: LayerShare) -> Advice | None:
        """Whether another number of ranks would be better for steps as these were, if messages take much."""
        if self.table is None or recent.steps < _ADVISE_AFTER:
            return None
        degree = self._collective.size
        now = Layer(degree, recent.compute_s, recent.communication_s, recent.exposed_s, self._costs.layers)
        tokens = max(1, round(recent.tokens))
        size = self._row_bytes * tokens // (len(self._planner.plan(tokens)) - 1)
        communication = Scaled(self.table.fits, degree, size)
        return advise(now, communication, self._config, recent.undivided_s)

    def planned(self, tokens: int) -> dict[str, Any]:
        """How a step of `tokens` tokens is cut, by what its layers' sums go, and what that should take."""
        plan = self._planner.plan(tokens)
        wave, layers = simulate(plan, self.costs), self._costs.layers
        sizes = [(stop - start) * self._row_bytes for start, stop in pairwise(plan)]
        algorithms = [] if self.table is None else sorted({self.table.choose(size) for size in sizes})
        return {
            "tokens": tokens,
            "chunks": len(sizes),
            "message_bytes": max(sizes),
            "algorithms": algorithms,
            "messages_per_layer": 2 * len(sizes),
            "step_s": wave.total_s,
            "layer_compute_s": wave.compute_s / layers,
            "layer_communication_s": self._alone_s(plan) / layers,
            "layer_exposed_s": wave.exposed_s / layers,
        }

    def measure_anew(self) -> dict[str, Any]:
        """Time the algorithms again; all ranks between the same two steps. The new table, as plain data."""
        self.table = crossovers(self._collective, self._most_bytes, self._depends_on, anew=True)
        link = link_of(self.table, self._row_bytes, self._most_bytes)
        self._costs = replace(self._costs, link=link)
        self._corrector = Corrector(self._costs)
        self._planner.use(self._costs)
        self._watch_anew()
        return {} if self.table is None else self.table.to_plain()


def _differ(a: Costs, b: Costs) -> bool:
    pairs = [(a.link.s_per_byte, b.link.s_per_byte), (a.link.busy_s, b.link.busy_s)]
    pairs.append((a.link.latency_s, b.link.latency_s))
    pairs += _numbers(a.attend, b.attend) + _numbers(a.feed, b.feed)
    return any(abs(x - y) > _TOLD_AT * max(abs(x), abs(y), 1e-7) for x, y in pairs)


def _numbers(one: Work, other: Work) -> list[tuple[float, float]]:
    return [(one.fixed_s, other.fixed_s), (one.row_s, other.row_s), (one.least_s, other.least_s)]
