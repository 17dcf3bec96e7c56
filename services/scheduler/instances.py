"""One instance as its scheduler sees it: session, frames in flight, slots, blocks and what awaits reuse.

States: `UNKNOWN → CLAIMING → CANARY → READY → DRAINING`, LOST from anywhere (docs/protocol.md §3).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from services.scheduler.blocks import BlockPool
from services.scheduler.budget import CostFit
from services.scheduler.sequences import Phase, Sequence
from shared.ids import BlockHash
from shared.wire import Claimed, Done, InstanceInfo, Step, StepTiming, Stored

SHARE_S = 30.0
"""Over this time what an instance was busy with fades."""


class State(Enum):
    """docs/protocol.md §3."""

    UNKNOWN = "unknown"
    CLAIMING = "claiming"
    CANARY = "canary"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Lane(Enum):
    """What the planner does with a running sequence in the next frame."""

    PREFILL = "prefill"
    DECODE = "decode"
    STALLED = "stalled"
    SPENT = "spent"
    """Its last token is drawn by a frame already issued; it waits for the result."""


class Verdict(Enum):
    """Of a result: see `Instance.judge`."""

    NEXT = "next"
    KNOWN = "known"
    GAP = "gap"
    FOREIGN = "foreign"


@dataclass(slots=True, eq=False)
class Frame:
    """A step frame whose result is not in."""

    step: Step
    issued_at: float
    firsts: list[Sequence]
    """Sequences whose known ids are all computed in it: it draws their first new token."""
    cost_s: float
    """What it is expected to take."""


@dataclass(slots=True)
class Resting:
    """Named by frames in flight: reusable once the result of frame `until` is in (G12)."""

    until: int
    blocks: list[int]
    slot: int = -1


@dataclass(slots=True, eq=False)
class FetchUnderWay:
    """Blocks that come from the second tier. They are held until the instance has said how it ended, whatever
    becomes of the sequence meanwhile: until then it may write into them."""

    op: int
    sequence: Sequence
    """Who waits for it, while `waits`."""
    kept: list[int]
    """The cached blocks before them, held so that they are still there afterwards."""
    blocks: list[int]
    hashes: list[BlockHash]
    """Of `blocks`; the first continues the chain of `kept`."""
    reserve: int
    """Blocks its sequence will need besides these."""
    left_tokens: int
    """Of the sequence, to be computed afterwards."""
    begun: float
    due: float
    """When it is expected to end."""
    give_up: float
    """Its sequence waits no longer than this."""
    end_by: float
    """When its end must have been told, or the session is at fault."""

    @property
    def waits(self) -> bool:
        """Whether its sequence still wants it."""
        return self.sequence.fetch is self


@dataclass(eq=False)
class Instance:
    """Everything known of one instance. A session begins with `begin_session`."""

    id: str
    info: InstanceInfo
    heard_at: float
    state: State = State.UNKNOWN
    incarnation: int = 0
    claim_id: str = ""
    claim_sent_at: float = 0.0
    claim_after: float = 0.0
    """Not claimed again before this time; set after a failed canary."""
    ready_once: bool = False
    """The canary of this session has passed."""
    stuck_at: int = 0
    """Next expected result at a beat that said it was computed; the second such beat proves it lost."""
    resent_at: float = -1.0
    progress_at: float = 0.0
    """Last result, or the first frame after a rest."""
    pending_inventory: list[Stored] = field(default_factory=list)

    next_seq: int = 1
    expected: int = 1
    in_flight: deque[Frame] = field(default_factory=deque)
    table: list[Sequence | None] = field(default_factory=list)
    """By slot: whose results these are."""
    free_slots: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    """Slots to be released by the next frame."""
    keeping: list[int] = field(default_factory=list)
    """Blocks of preempted sequences that the next frame names for the second tier."""
    resting: deque[Resting] = field(default_factory=deque)
    returning: int = 0
    """Blocks among the resting."""
    running: dict[Sequence, Lane] = field(default_factory=dict)
    prefilling: list[Sequence] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)
    decoding: int = 0
    spent: int = 0
    calendar: dict[int, list[Sequence]] = field(default_factory=dict)
    """frame → sequences that then need a block or are spent. Entries whose `due` has moved are stale."""
    reserved: int = 0
    """Blocks set aside for expected output of the running."""
    backlog: int = 0
    """Prompt tokens admitted and not yet planned."""
    ahead_s: float = 0.0
    """Expected time of the frames in flight."""
    prompts_s: float = 0.0
    """Seconds spent on prompts, fading; see `prompt_share`."""
    prompts_at: float = 0.0
    fetches: dict[int, FetchUnderWay] = field(default_factory=dict)
    """By op: those whose end has not been told."""
    next_op: int = 1
    ready_at: float = 0.0
    """When its canary passed."""

    def __post_init__(self) -> None:
        self.pool = BlockPool(0)
        self.fit = CostFit(self.info.prefill_tok_s, self.info.decode_step_s)

    @property
    def planned(self) -> bool:
        """Whether frames may be issued."""
        return self.state in (State.CANARY, State.READY, State.DRAINING)

    def begin_session(self, claimed: Claimed, inventory: list[Stored]) -> None:
        """A claim was accepted: slots are empty, hashed blocks are as in the inventory, frames start at 1."""
        self.info = claimed.info
        self.incarnation = claimed.incarnation
        self.next_seq = self.expected = 1
        self.in_flight = deque()
        self.table = [None] * claimed.info.max_slots
        self.free_slots = list(range(claimed.info.max_slots - 1, -1, -1))
        self.leaving = []
        self.keeping = []
        self.resting = deque()
        self.returning = self.decoding = self.spent = self.reserved = self.backlog = 0
        self.running = {}
        self.prefilling = []
        self.stalled = []
        self.calendar = {}
        self.ahead_s = 0.0
        self.fetches = {}
        self.next_op = 1
        self.stuck_at = 0
        self.resent_at = -1.0
        self.ready_once = False
        self.pool = BlockPool(claimed.info.blocks_total, ((row.block, row.hash) for row in inventory))  # type: ignore[misc]

    # Results

    def judge(self, done: Done, epoch: int, owner: str) -> Verdict:
        """Whether a result is the next one of this session (G7, G8)."""
        if done.epoch != epoch or done.owner != owner or done.incarnation != self.incarnation:
            return Verdict.FOREIGN
        if done.seq < self.expected:
            return Verdict.KNOWN
        if done.seq > self.expected or not self.in_flight:
            return Verdict.GAP
        return Verdict.NEXT

    def settle(self, seq: int) -> None:
        """Everything that only frames up to `seq` named can be reused."""
        resting = self.resting
        while resting and resting[0].until <= seq:
            row = resting.popleft()
            self.returning -= len(row.blocks)
            self.pool.release(row.blocks)
            if row.slot >= 0:
                self.free_slots.append(row.slot)

    def rest(self, blocks: list[int], slot: int, until: int) -> None:
        """Keep these from reuse until the result of frame `until` is in (G12)."""
        self.resting.append(Resting(until, blocks, slot))
        self.returning += len(blocks)
        self.settle(self.expected - 1)

    # The running

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence off: its slot is released by the next frame, its blocks rest until nothing in
        flight names them."""
        lane = self.running.pop(sequence)
        sequence.reached = max(sequence.reached, self.computed(sequence, lane))
        if lane is Lane.DECODE:
            self.decoding -= 1
        elif lane is Lane.SPENT:
            self.spent -= 1
        elif lane is Lane.PREFILL:
            self.prefilling.remove(sequence)
            self.backlog -= sequence.known - sequence.planned
        else:
            self.stalled.remove(sequence)
        self.reserved -= sequence.reserved
        self.table[sequence.slot] = None
        self.leaving.append(sequence.slot)
        self.rest(sequence.blocks, sequence.slot, self.next_seq - 1)
        sequence.instance = None
        sequence.slot = -1
        sequence.blocks = []
        sequence.reserved = 0

    def unconfirmed(self) -> list[Sequence]:
        """Sequences whose known ids are being computed: their full blocks can soon be shared."""
        firsts = [sequence for frame in self.in_flight for sequence in frame.firsts]
        return [s for s in firsts if s.instance is self and s.phase is Phase.PREFILL] + self.prefilling

    def computed(self, sequence: Sequence, lane: Lane) -> int:
        """Tokens of a sequence of this lane whose KV is there once the frames issued are computed."""
        decoded = self.next_seq - sequence.since if lane is Lane.DECODE else 0
        return sequence.planned + max(0, decoded)

    def start_decoding(self, sequence: Sequence, frame: int, computed: int) -> None:
        """From `frame` on it computes one token a frame, without being named."""
        self.running[sequence] = Lane.DECODE
        self.decoding += 1
        sequence.planned = computed
        sequence.since = frame
        room = len(sequence.blocks) * self.info.block_tokens
        sequence.due = frame + min(room, sequence.end) - computed
        self.calendar.setdefault(sequence.due, []).append(sequence)

    def observe(self, timing: StepTiming, now: float) -> None:
        """Learn from a step that was computed."""
        self.fit.observe(timing)
        if timing.prefill_tokens:
            self.prompts_s = (
                self.prompt_share(now) * SHARE_S + timing.prefill_tokens * self.fit.cost.per_token_s
            )
            self.prompts_at = now

    def prompt_share(self, now: float) -> float:
        """Part of its time that prompts took lately."""
        return self.prompts_s / SHARE_S * math.exp(min(0.0, self.prompts_at - now) / SHARE_S)

    # Fetches

    @property
    def fetchers(self) -> list[FetchUnderWay]:
        """Fetches somebody waits for: each will take a slot, and the rest of its blocks."""
        return [fetch for fetch in self.fetches.values() if fetch.waits] if self.fetches else []

    @property
    def set_aside(self) -> int:
        """Blocks kept for the expected output of the running, and for the rest of those that fetch."""
        return self.reserved + sum(fetch.reserve for fetch in self.fetchers)

    def end_fetch(self, op: int, count: int) -> FetchUnderWay | None:
        """The first `count` blocks can be found from now on; all are free to be handed out again. None: its
        end was told before, or it is none of ours."""
        fetch = self.fetches.pop(op, None)
        if fetch is None:
            return None
        for block, block_hash in zip(fetch.blocks[: max(0, count)], fetch.hashes):
            self.pool.confirm(block, block_hash)
        self.pool.release(fetch.kept + fetch.blocks)
        return fetch

    def check(self) -> None:
        """Raises AssertionError where the books contradict each other."""
        self.pool.check()
        lanes = list(self.running.values())
        assert self.decoding == lanes.count(Lane.DECODE), "decoding miscounted"
        assert self.spent == lanes.count(Lane.SPENT), "spent miscounted"
        assert len(self.prefilling) == lanes.count(Lane.PREFILL), "prefilling miscounted"
        assert len(self.stalled) == lanes.count(Lane.STALLED), "stalled miscounted"
        assert self.reserved == sum(seq.reserved for seq in self.running), "reservation miscounted"
        assert self.backlog == sum(seq.known - seq.planned for seq in self.prefilling), "backlog miscounted"
        held = [0] * self.pool.size
        for sequence in self.running:
            assert self.table[sequence.slot] is sequence, "a running sequence is not in its slot"
            for block in sequence.blocks:
                held[block] += 1
        for row in self.resting:
            for block in row.blocks:
                held[block] += 1
        for op, fetch in self.fetches.items():
            assert fetch.op == op < self.next_op, "a fetch has another's number"
            assert len(fetch.blocks) == len(fetch.hashes) > 0, "a fetch has blocks without a hash"
            for block in fetch.kept + fetch.blocks:
                held[block] += 1
            if fetch.waits:
                assert fetch.sequence.phase is Phase.QUEUED, "who waits for a fetch is not queued"
        assert held == self.pool.references(), "blocks are held by nobody, or not by whom they should"
        slots = [s.slot for s in self.running] + [row.slot for row in self.resting if row.slot >= 0]
        slots += self.free_slots
        assert sorted(slots) == list(range(len(self.table))), "slots are lost or doubled"
        assert len(self.in_flight) == self.next_seq - self.expected, "frames in flight miscounted"
