"""The persistent batch: step frames change it, executors read it, results advance it (design §4).

Pure bookkeeping over numpy arrays, no torch, no clock. A steady decode step costs a handful of array
operations whatever the number of slots; only what changes is handled one by one.

Rules that both ends of the wire share:
- A slot *decodes* once all but its last known id are computed; until then only `work` moves it.
- A stopped slot computes nothing until it is released, but blocks handed to it lose their hash all the same:
  the scheduler gave them away by that very act.

Two frames may be under way. Applying one advances all that follows from it without its tokens: what is
computed, who decodes on, whose length ends with it. Its commit brings the tokens: known ids, stops, confirmed
blocks. So a frame that only goes on can be applied before the one before is committed, and its result is the
same; a row of a sequence that turns out to have stopped is dropped.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.faults import FrameFault, RequestFault, check_sampling, length_limit, read_ids
from services.worker.fetches import Fetches
from services.worker.hashes import BlockHashes
from services.worker.prefixes import Prefixes
from services.worker.shape import BatchShape
from services.worker.step import I32, NOT_FINITE, SlotArrays, StepInput, StepOutput
from services.worker.stops import StopReason, StopRules
from services.worker.tables import BlockTables, Rows
from shared.ids import BlockHash
from shared.wire import Admit, Extend, Fetch, KvOp, SlotLogprobs, SlotPromptLogprobs, Step, Stopped, Stored


@dataclass(kw_only=True)
class AppliedStep(StepInput):
    """A step that was applied, with what its commit has to know of that moment."""

    rows: Rows
    """`slots` once more, as numpy indexes fastest."""
    ends: I32
    """How many ids of each row's slot are computed after it."""
    full: NDArray[np.bool_] | None
    """Rows that draw the last id their length allows; None if there are none."""
    decodes: NDArray[np.bool_] | None
    """Rows that compute a drawn id, not a prompt; None: all of them, and all of them draw another."""
    idle: int
    """Stopped slots at that moment."""
    given: list[int]
    """Blocks that lose their hash with its commit."""
    evicted: list[tuple[int, BlockHash]]
    """Hashed blocks that it hands out, `given` ones and others: what they hold is overwritten from now on."""
    offload: list[tuple[int, BlockHash]] = field(default_factory=list)
    """Hashed blocks that are to be kept in the second tier; some may be among the `evicted`."""
    fetch: list[Fetch] = field(default_factory=list)
    """Fetches that begin with it. Each ends by `Batch.fetched`, or with the session."""
    reused: list[list[tuple[int, BlockHash]]] = field(default_factory=list)
    """Of each sequence that it admits, the cached blocks with which it begins."""
    rejected: list[Stopped] = field(default_factory=list)


@dataclass
class StepResult:
    """The content of a `Done`, before it is addressed."""

    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    logprobs: list[SlotLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SlotPromptLogprobs] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0


def goes_on(frame: Step) -> bool:
    """Whether the frame may be applied before the one before it is committed."""
    return not (frame.admit or frame.release or frame.kv_ops or frame.fetch or frame.offload)


class Batch:
    """Slots [0, max_slots) and the hashes of blocks [0, blocks_total).

    `apply(frame)` → the executor computes → `commit(step, output)`, in the order of the frames. Between a
    frame's two there may be one `apply`, of a frame that `goes_on`.
    """

    def __init__(self, shape: BatchShape, fingerprint: str) -> None:
        self.shape = shape
        self.hashes = BlockHashes(shape.blocks_total)
        self._prefixes = Prefixes(shape, fingerprint, self.hashes)
        self._stops = StopRules(shape)
        self._tables = BlockTables(shape)
        self._fetches = Fetches(self._tables, self.hashes)
        slots = shape.max_slots
        self.arrays = SlotArrays(
            tokens=np.zeros((slots, shape.max_len), np.int32),
            block_table=self._tables.rows,
            computed=np.zeros(slots, np.int32),
            known=np.zeros(slots, np.int32),
            prompt_len=np.zeros(slots, np.int32),
            choice=np.zeros(slots, np.int32),
            sampling=[None] * slots,
            version=np.zeros(slots, np.int64),
        )
        self._decoding = np.zeros(slots, np.bool_)
        # not closed, and all but the last id computed; that one may be on its way
        self._closed = np.zeros(slots, np.bool_)
        # computes nothing more: stopped, or the step under way draws its last id
        self._stopped = np.zeros(slots, np.bool_)
        # its end was reported
        self._ones = np.ones(slots, np.int32)
        self._trues = np.ones(slots, np.bool_)
        self._live = 0
        self._idle = 0
        # slots in use, and those of them that have stopped

    @property
    def live(self) -> int:
        """Slots not released, stopped ones included."""
        return self._live

    @property
    def running(self) -> int:
        """Slots whose sequence has not stopped."""
        return self._live - self._idle

    @property
    def fetching(self) -> int:
        """Fetches that have not ended."""
        return len(self._fetches)

    def reset(self) -> None:
        """A new session, or a frame that failed half-way: every slot is free; hashed blocks stay."""
        arrays = self.arrays
        arrays.sampling[:] = [None] * self.shape.max_slots
        self._tables.reset()
        self._stops.reset()
        self._fetches.reset()
        for counters in (arrays.known, arrays.computed):
            counters.fill(0)
        for flags in (self._decoding, self._closed, self._stopped):
            flags.fill(False)
        self._live = self._idle = 0

    def apply(self, frame: Step) -> AppliedStep:
        """Take the frame's changes in their order of effect and say what is to be computed.

        Raises `FrameFault`; the batch must be reset then, once a step under way is committed. Nothing is
        computed before all of it is checked.
        """
        if frame.work or not goes_on(frame):
            return self._apply_changes(frame)
        given: list[int] = []
        for extend in frame.blocks:
            self._extend(extend, given)
        rows = self._decoding.nonzero()[0]
        starts = self.arrays.computed[rows]
        ones = self._ones[: len(rows)]
        ends = starts + ones
        self._tables.check_room(rows, ends)
        return AppliedStep(
            rows.astype(np.int32),
            starts,
            ones,
            self._trues[: len(rows)],
            rows=rows,
            ends=ends,
            full=self._advance(rows, ends),
            decodes=None,
            idle=self._idle,
            given=given,
            evicted=self.hashes.held(given) if given else [],
        )

    def commit(self, step: AppliedStep, output: StepOutput) -> StepResult:
        """Advance the batch by what the executor computed."""
        result = StepResult(stopped=step.rejected)
        if step.given:
            self.hashes.forget_each(step.given)
        if self._idle != step.idle:
            step, output = self._without_stopped(step, output)
        rows, ends, tokens = step.rows, step.ends, output.tokens
        if not len(rows):
            return result
        result.decode_tokens = len(rows)
        if step.decodes is not None:
            result.decode_tokens = int(np.count_nonzero(step.decodes))
            result.prefill_tokens = int(step.counts.sum()) - result.decode_tokens
        arrays, full = self.arrays, step.full
        drawn = None if tokens.min() >= 0 else self._drawn(step, tokens, result)
        result.stored = self._prefixes.confirm(rows, ends, arrays.tokens, arrays.block_table)
        if drawn is None:
            self._append(rows, ends, tokens, full, result)
        else:
            full = None if full is None else full[drawn]
            self._append(rows[drawn], ends[drawn], tokens[drawn], full, result)
        for row, of in output.logprobs.items():
            result.logprobs.append(SlotLogprobs(int(rows[row]), of.chosen, of.top))
        for row, of_prompt in output.prompt_logprobs.items():
            result.prompt_logprobs.append(
                SlotPromptLogprobs(int(rows[row]), of_prompt.start, of_prompt.chosen, of_prompt.top)
            )
        return result

    def fetched(self, op: int, count: int) -> bool:
        """The fetch has ended: its first `count` blocks hold what was asked for, and can be shared now.

        Only between frames, nothing under way. False: it is none of this session. Raises ValueError for a
        count beyond its blocks.
        """
        return self._fetches.end(op, count)

    # Changes, each checked before it touches anything.

    def _apply_changes(self, frame: Step) -> AppliedStep:
        given: list[int] = []
        evicted: list[tuple[int, BlockHash]] = []
        rejected: list[Stopped] = []
        reused: list[list[tuple[int, BlockHash]]] = []
        for slot in frame.release:
            self._check_live(slot)
            self._free(slot)
        offload = self._offload(frame.offload) if frame.offload else []
        for fetch in frame.fetch:
            self._give_up(self._fetches.begin(fetch), evicted)
        for admit in frame.admit:
            if cached := self._admit(admit, evicted, rejected):
                reused.append(self.hashes.held(admit.blocks[:cached]))
        for extend in frame.blocks:
            self._extend(extend, given)
        if given:
            evicted += self.hashes.held(given)
        copies = [self._copy(op, evicted) for op in frame.kv_ops]

        known, decoding = self.arrays.known, self._decoding
        counts = decoding.astype(np.int32)
        chunked: set[int] = set()
        for slot, count in ((work.slot, work.count) for work in frame.work):
            self._check_live(slot)
            if slot in chunked:
                raise FrameFault("number of work rows", got="two", allowed="one a slot", slot=slot)
            chunked.add(slot)
            if self._closed[slot]:
                continue
            left = 1 if decoding[slot] else int(known[slot] - self.arrays.computed[slot])
            if not 0 <= count <= left:
                raise FrameFault("count of work", got=count, allowed=f"0 to {left}", slot=slot)
            counts[slot] = count
        rows = counts.nonzero()[0]
        starts, counts = self.arrays.computed[rows], counts[rows]
        ends = starts + counts
        self._tables.check_room(rows, ends)
        decodes = decoding[rows]
        samples = decodes | (ends == known[rows])
        decoding[rows] = samples | (ends == known[rows] - 1)
        return AppliedStep(
            rows.astype(np.int32),
            starts,
            counts,
            samples,
            copies,
            rows=rows,
            ends=ends,
            full=self._advance(rows, ends),
            decodes=decodes,
            idle=self._idle,
            given=given,
            evicted=evicted,
            offload=offload,
            fetch=frame.fetch,
            reused=reused,
            rejected=rejected,
        )

    def _advance(self, rows: Rows, ends: I32) -> NDArray[np.bool_] | None:
        """Ids below `ends` count as computed; which rows' sequences end with the id they draw."""
        self.arrays.computed[rows] = ends
        # A row that does not draw is below its limit even with all its known ids.
        full = self._stops.full(rows, ends)
        if full is not None:
            ending = rows[full]
            self._decoding[ending] = False
            self._closed[ending] = True
        return full

    def _offload(self, blocks: list[int]) -> list[tuple[int, BlockHash]]:
        held = self.hashes.held(self._tables.read(blocks).tolist())
        if len(held) < len(blocks):
            without = next(block for block in blocks if self.hashes.of(block) is None)
            raise FrameFault("block to offload", got=f"{without}, which has no hash", allowed="a hashed one")
        return held

    def _give_up(self, blocks: I32, evicted: list[tuple[int, BlockHash]]) -> None:
        """They are handed out anew, and a later part of the frame must not find what they held."""
        if held := self.hashes.held_of(blocks):
            evicted += held
            self.hashes.forget_each([block for block, _ in held])

    def _admit(self, admit: Admit, evicted: list[tuple[int, BlockHash]], rejected: list[Stopped]) -> int:
        """How many cached blocks it begins with."""
        slot, shape = admit.slot, self.shape
        self._check_slot(slot)
        if self.arrays.sampling[slot] is not None:
            raise FrameFault("slot to admit into", got="taken", allowed="a free one", slot=slot)
        length = len(admit.ids)
        if not 0 < admit.prompt_len <= length:
            raise FrameFault("prompt_len", got=admit.prompt_len, allowed=f"1 to {length}", slot=slot)
        if not 0 <= admit.computed < length:
            raise FrameFault("computed", got=admit.computed, allowed=f"0 to {length - 1}", slot=slot)
        if not 0 <= admit.choice < 2**31:
            raise FrameFault("choice", got=admit.choice, allowed="0 to 2^31 - 1", slot=slot)
        cached = admit.computed // shape.block_tokens
        if len(admit.blocks) * shape.block_tokens < admit.computed:
            raise FrameFault(
                "table", got=f"{len(admit.blocks)} blocks", allowed=f"{admit.computed} ids long", slot=slot
            )
        blocks = self._tables.read(admit.blocks, slot)
        self._live += 1
        self.arrays.sampling[slot] = admit.sampling
        self.arrays.version[slot] += 1
        self.arrays.generation += 1
        try:
            ids = read_ids(admit.ids, shape.vocab_size)
            check_sampling(admit.sampling, shape.vocab_size)
            limit = length_limit(admit, shape.max_len)
        except RequestFault as fault:
            self._stopped[slot] = self._closed[slot] = True
            self._idle += 1
            rejected.append(Stopped(slot, "error", str(fault)))
            self._give_up(blocks[cached:], evicted)
            return 0
        parent = self._prefixes.check(admit, ids, cached)

        arrays = self.arrays
        arrays.tokens[slot, :length] = ids
        arrays.known[slot] = length
        arrays.computed[slot] = admit.computed
        arrays.prompt_len[slot] = admit.prompt_len
        arrays.choice[slot] = admit.choice
        self._decoding[slot] = admit.computed == length - 1
        self._prefixes.begin(slot, cached, parent)
        self._stops.watch(admit, limit)
        self._tables.share(slot, blocks[:cached])
        # A later admission of the frame may name one of them as cached: it must not find the old content.
        self._give_up(blocks[cached:], evicted)
        self._tables.hand_out(slot, blocks[cached:])
        return cached

    def _extend(self, extend: Extend, given: list[int]) -> None:
        """Append blocks; their former content is given up by the scheduler, and so by us.

        They are `given` for the commit: until then the step before may still tell of what it changed.
        """
        slot = extend.slot
        self._check_live(slot)
        closed = self._closed[slot]
        if len(extend.blocks) == 1 and not closed:
            self._tables.hand_out_one(slot, extend.blocks[0])
        else:
            blocks = self._tables.read(extend.blocks, slot)
            if not closed:
                self._tables.hand_out(slot, blocks)
        given += extend.blocks

    def _copy(self, op: KvOp, evicted: list[tuple[int, BlockHash]]) -> tuple[int, int]:
        ends = self._tables.read([op.src, op.dst])
        self._tables.check_writable(op.dst)
        self._give_up(ends[1:], evicted)
        return op.src, op.dst

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.shape.max_slots:
            raise FrameFault("slot", got=slot, allowed=f"0 to {self.shape.max_slots - 1}")

    def _check_live(self, slot: int) -> None:
        self._check_slot(slot)
        if self.arrays.sampling[slot] is None:
            raise FrameFault("slot", got="free", allowed="one that holds a sequence", slot=slot)

    def _free(self, slot: int) -> None:
        if self._stopped[slot]:
            self._idle -= 1
        else:
            self._tables.leave(slot)
        self._stops.forget(slot)
        self._tables.clear(slot)
        self.arrays.known[slot] = self.arrays.computed[slot] = 0
        self.arrays.sampling[slot] = None
        self._decoding[slot] = self._closed[slot] = self._stopped[slot] = False
        self._live -= 1

    # Results.

    def _without_stopped(self, step: AppliedStep, output: StepOutput) -> tuple[AppliedStep, StepOutput]:
        """The step without rows of slots that the step before stopped, after this one was applied.

        What they wrote lies behind the last confirmed block of their slot, where nobody finds it.
        """
        kept = ~self._stopped[step.rows]
        if kept.all():
            return step, output
        number = np.cumsum(kept) - 1
        left = replace(
            step,
            slots=step.slots[kept],
            starts=step.starts[kept],
            counts=step.counts[kept],
            samples=step.samples[kept],
            rows=step.rows[kept],
            ends=step.ends[kept],
            full=None if step.full is None else step.full[kept],
            decodes=None if step.decodes is None else step.decodes[kept],
        )
        logprobs = {int(number[row]): of for row, of in output.logprobs.items() if kept[row]}
        prompts = {int(number[row]): of for row, of in output.prompt_logprobs.items() if kept[row]}
        return left, StepOutput(output.tokens[kept], logprobs, prompts)

    def _drawn(self, step: AppliedStep, tokens: I32, result: StepResult) -> NDArray[np.bool_]:
        """Rows that drew a token. Those without finite logits stop."""
        drawn = step.samples & (tokens >= 0)
        for row in (step.samples & ~drawn).nonzero()[0].tolist():
            if tokens[row] != NOT_FINITE:
                raise RuntimeError(f"the executor drew no token for row {row}, which samples")
            slot = int(step.rows[row])
            self._prefixes.spoil(slot)
            self._stop(slot, result, "error", "its logits were not finite")
        return drawn

    def _append(
        self, rows: Rows, positions: I32, tokens: I32, full: NDArray[np.bool_] | None, result: StepResult
    ) -> None:
        """The drawn tokens become ids number `positions` of their slots."""
        self.arrays.tokens[rows, positions] = tokens
        self.arrays.known[rows] = positions + 1
        result.slots = rows.tolist()
        result.tokens = tokens.tolist()
        for slot, reason in self._stops.found(result.slots, positions, tokens, full):
            self._stop(slot, result, reason)

    def _stop(self, slot: int, result: StepResult, reason: StopReason, detail: str = "") -> None:
        self._stopped[slot] = self._closed[slot] = True
        self._idle += 1
        self._decoding[slot] = False
        self._tables.leave(slot)
        result.stopped.append(Stopped(slot, reason, detail))
