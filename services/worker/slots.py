"""The persistent batch: step frames change it, executors read it, results advance it (design §4).

Pure bookkeeping over numpy arrays, no torch, no clock. A steady decode step costs a handful of array
operations whatever the number of slots; only what changes is handled one by one.

Rules that both ends of the wire share:
- A slot *decodes* once all but its last known id are computed; until then only `work` moves it.
- A stopped slot computes nothing until it is released, but blocks handed to it lose their hash all the same:
  the scheduler gave them away by that very act.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.worker.faults import FrameFault, RequestFault, check_sampling, length_limit, read_ids
from services.worker.hashes import BlockHashes
from services.worker.shape import BatchShape
from services.worker.step import I32, SlotArrays, StepInput, StepOutput
from services.worker.tables import BlockTables, Rows
from shared.blocks import extend_packed, root_hash
from shared.ids import BlockHash
from shared.wire import Admit, Extend, KvOp, SlotLogprobs, SlotPromptLogprobs, Step, Stopped, Stored

NOT_FINITE = -2
"""`StepOutput.tokens` of a row whose logits were not finite."""

NEVER = np.iinfo(np.int32).max

ROOTS_KEPT = 1024
"""Root hashes cached by salt; salts come from outside, so their number has a bound."""

StopReason = Literal["stop", "length", "error"]


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


class Batch:
    """Slots [0, max_slots) and the hashes of blocks [0, blocks_total).

    Strictly alternating: `apply(frame)` → the executor computes → `commit(input, output)`.
    """

    def __init__(self, shape: BatchShape, fingerprint: str) -> None:
        self.shape = shape
        self.hashes = BlockHashes(shape.blocks_total)
        self._fingerprint = fingerprint
        self._roots: dict[str, BlockHash] = {}
        self._tables = BlockTables(shape)
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
        # live, not stopped, and all but the last known id computed
        self._stopped = np.zeros(slots, np.bool_)
        self._limit = np.zeros(slots, np.int32)
        # the sequence ends when it has this many ids
        self._full_at = np.zeros(slots, np.int32)
        # the slot's next block is confirmed when this many ids are computed; `_parent` names the one before
        self._parent: list[BlockHash] = [BlockHash(b"")] * slots
        self._stop_ids: list[frozenset[int]] = [frozenset()] * slots
        self._stop_from = np.zeros(slots, np.int32)
        # stop ids count from this position on (min_tokens)
        self._watchers: Counter[int] = Counter()
        # per id: live slots it may stop
        self._watched = np.zeros(shape.vocab_size, np.bool_)
        # ids with watchers, so that one look-up settles almost every token
        self._rejected: list[Stopped] = []
        self._steady = False
        # the step at hand is one decode token of every decoding slot, and nothing else
        self._rows: Rows = np.zeros(0, np.intp)
        self._ends = np.zeros(0, np.int32)
        # of the step at hand: its slots, and how many of their ids are computed after it
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

    def reset(self) -> None:
        """A new session, or a frame that failed half-way: every slot is free; hashed blocks stay."""
        arrays = self.arrays
        arrays.sampling[:] = [None] * self.shape.max_slots
        self._tables.reset()
        for counters in (arrays.known, arrays.computed):
            counters.fill(0)
        for flags in (self._decoding, self._stopped, self._watched):
            flags.fill(False)
        self._watchers.clear()
        self._stop_ids[:] = [frozenset()] * self.shape.max_slots
        self._rejected = []
        self._live = self._idle = 0

    def apply(self, frame: Step) -> StepInput:
        """Take the frame's changes in their order of effect and say what is to be computed.

        Raises `FrameFault`; the batch must be reset then. Nothing is computed before all of it is checked.
        """
        self._steady = not (frame.admit or frame.work or frame.release or frame.kv_ops)
        if not self._steady:
            return self._apply_changes(frame)
        for extend in frame.blocks:
            self._extend(extend)
        self._rows = rows = self._decoding.nonzero()[0]
        starts = self.arrays.computed[rows]
        ones = self._ones[: len(rows)]
        self._ends = starts + ones
        self._tables.check_room(rows, self._ends)
        return StepInput(rows.astype(np.int32), starts, ones, self._trues[: len(rows)])

    def commit(self, step: StepInput, output: StepOutput) -> StepResult:
        """Advance the batch by what the executor computed."""
        result = StepResult(stopped=self._rejected)
        self._rejected = []
        rows, ends = self._rows, self._ends
        if not len(rows):
            return result
        result.decode_tokens = len(rows)
        if not self._steady:
            result.decode_tokens = int(np.count_nonzero(self._decoding[rows]))
            result.prefill_tokens = int(step.counts.sum()) - result.decode_tokens
        self.arrays.computed[rows] = ends
        tokens = output.tokens
        if tokens.min() >= 0:
            self._confirm(rows, ends, result.stored)
            self._append(rows, ends, tokens, result)
        else:
            drawn = self._drawn(step, tokens, result)
            self._confirm(rows, ends, result.stored)
            self._append(rows[drawn], ends[drawn], tokens[drawn], result)
        for row, of in output.logprobs.items():
            result.logprobs.append(SlotLogprobs(int(rows[row]), of.chosen, of.top))
        for row, of_prompt in output.prompt_logprobs.items():
            result.prompt_logprobs.append(
                SlotPromptLogprobs(int(rows[row]), of_prompt.start, of_prompt.chosen, of_prompt.top)
            )
        return result

    # Changes, each checked before it touches anything.

    def _apply_changes(self, frame: Step) -> StepInput:
        for slot in frame.release:
            self._check_live(slot)
            self._free(slot)
        for admit in frame.admit:
            self._admit(admit)
        for extend in frame.blocks:
            self._extend(extend)
        copies = [self._copy(op) for op in frame.kv_ops]

        counts = self._decoding.astype(np.int32)
        chunked: set[int] = set()
        for slot, count in ((work.slot, work.count) for work in frame.work):
            self._check_live(slot)
            if slot in chunked:
                raise FrameFault("number of work rows", got="two", allowed="one a slot", slot=slot)
            chunked.add(slot)
            if self._stopped[slot]:
                continue
            left = int(self.arrays.known[slot] - self.arrays.computed[slot])
            if not 0 <= count <= left:
                raise FrameFault("count of work", got=count, allowed=f"0 to {left}", slot=slot)
            counts[slot] = count
        self._rows = rows = counts.nonzero()[0]
        starts, counts = self.arrays.computed[rows], counts[rows]
        self._ends = starts + counts
        self._tables.check_room(rows, self._ends)
        samples = self._ends == self.arrays.known[rows]
        return StepInput(rows.astype(np.int32), starts, counts, samples, copies)

    def _admit(self, admit: Admit) -> None:
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
            self._stopped[slot] = True
            self._idle += 1
            self._rejected.append(Stopped(slot, "error", str(fault)))
            self.hashes.forget_all(blocks[cached:])
            return
        parent = self._check_prefix(admit, ids, cached)

        arrays = self.arrays
        arrays.tokens[slot, :length] = ids
        arrays.known[slot] = length
        arrays.computed[slot] = admit.computed
        arrays.prompt_len[slot] = admit.prompt_len
        arrays.choice[slot] = admit.choice
        self._decoding[slot] = admit.computed == length - 1
        self._limit[slot] = limit
        self._full_at[slot] = (cached + 1) * shape.block_tokens
        self._parent[slot] = parent
        stop_ids = frozenset(admit.sampling.stop_token_ids)
        self._stop_ids[slot] = stop_ids
        self._stop_from[slot] = min(admit.prompt_len + max(0, admit.sampling.min_tokens), shape.max_len)
        for token in stop_ids:
            self._watchers[token] += 1
            self._watched[token] = True
        self._tables.share(slot, blocks[:cached])
        self._hand_out(slot, blocks[cached:])

    def _extend(self, extend: Extend) -> None:
        slot = extend.slot
        self._check_live(slot)
        if len(extend.blocks) == 1 and not self._stopped[slot]:
            (block,) = extend.blocks
            self._tables.hand_out_one(slot, block)
            self.hashes.forget(block)
        else:
            self._hand_out(slot, self._tables.read(extend.blocks, slot))

    def _copy(self, op: KvOp) -> tuple[int, int]:
        self._tables.read([op.src, op.dst])
        self._tables.check_writable(op.dst)
        self.hashes.forget(op.dst)
        return op.src, op.dst

    def _hand_out(self, slot: int, blocks: I32) -> None:
        """Append blocks whose former content is given up, by the scheduler and so by us."""
        self.hashes.forget_all(blocks)
        if not self._stopped[slot]:
            self._tables.hand_out(slot, blocks)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.shape.max_slots:
            raise FrameFault("slot", got=slot, allowed=f"0 to {self.shape.max_slots - 1}")

    def _check_live(self, slot: int) -> None:
        self._check_slot(slot)
        if self.arrays.sampling[slot] is None:
            raise FrameFault("slot", got="free", allowed="one that holds a sequence", slot=slot)

    def _check_prefix(self, admit: Admit, ids: I32, cached: int) -> BlockHash:
        """Hash of the last cached block. A hit is a belief of the scheduler; what our blocks hold decides."""
        root = self._roots.get(admit.salt)
        if root is None:
            root = root_hash(self._fingerprint, self.shape.block_tokens, admit.salt)
            if len(self._roots) < ROOTS_KEPT:
                self._roots[admit.salt] = root
        parent, size = root, self.shape.block_tokens
        for index, block in enumerate(admit.blocks[:cached]):
            parent = extend_packed(parent, ids[index * size : (index + 1) * size].tobytes())
            if self.hashes.of(block) != parent:
                raise FrameFault(
                    "cached block",
                    got=f"{block}, which holds something else",
                    allowed="the block of this prefix",
                    slot=admit.slot,
                )
        return parent

    # Results.

    def _drawn(self, step: StepInput, tokens: I32, result: StepResult) -> NDArray[np.bool_]:
        """Rows that drew a token. Those in their prompt move on; those without finite logits stop."""
        rows, waiting = self._rows, ~step.samples
        self._decoding[rows[waiting]] = (self._ends == self.arrays.known[rows] - 1)[waiting]
        drawn = step.samples & (tokens >= 0)
        for row in (step.samples & ~drawn).nonzero()[0].tolist():
            if tokens[row] != NOT_FINITE:
                raise RuntimeError(f"the executor drew no token for row {row}, which samples")
            slot = int(rows[row])
            # What it computed is not fit to be shared.
            self._full_at[slot] = NEVER
            self._stop(slot, result, "error", "its logits were not finite")
        return drawn

    def _confirm(self, rows: Rows, ends: I32, stored: list[Stored]) -> None:
        """Hash every block whose last token this step wrote."""
        filled = (ends >= self._full_at[rows]).nonzero()[0]
        if not len(filled):
            return
        size, width = self.shape.block_tokens, 4 * self.shape.block_tokens
        tokens, table, store = self.arrays.tokens, self.arrays.block_table, self.hashes.store
        for slot, end in zip(rows[filled].tolist(), ends[filled].tolist(), strict=True):
            first, last = int(self._full_at[slot]) // size - 1, end // size
            self._full_at[slot] = (last + 1) * size
            parent = self._parent[slot]
            packed = tokens[slot, first * size : last * size].tobytes()
            for index, block in enumerate(table[slot, first:last].tolist()):
                parent = extend_packed(parent, packed[index * width : (index + 1) * width])
                store(block, parent)
                stored.append(Stored(block, parent))
            self._parent[slot] = parent

    def _append(self, rows: Rows, positions: I32, tokens: I32, result: StepResult) -> None:
        """The drawn tokens become ids number `positions` of their slots."""
        arrays = self.arrays
        arrays.tokens[rows, positions] = tokens
        lengths = positions + 1
        arrays.known[rows] = lengths
        if not self._steady:
            self._decoding[rows] = True
        result.slots = rows.tolist()
        result.tokens = tokens.tolist()
        ended = lengths >= self._limit[rows]
        if self._watchers:
            self._stop_on_ids(positions, tokens, ended, result)
        elif ended.any():
            for row in ended.nonzero()[0].tolist():
                self._stop(result.slots[row], result, "length")

    def _stop_on_ids(self, positions: I32, tokens: I32, ended: NDArray[np.bool_], result: StepResult) -> None:
        for row in (ended | self._watched[tokens]).nonzero()[0].tolist():
            slot = result.slots[row]
            if result.tokens[row] in self._stop_ids[slot] and positions[row] >= self._stop_from[slot]:
                self._stop(slot, result, "stop")
            elif ended[row]:
                self._stop(slot, result, "length")

    def _stop(self, slot: int, result: StepResult, reason: StopReason, detail: str = "") -> None:
        self._stopped[slot] = True
        self._idle += 1
        self._decoding[slot] = False
        self._tables.leave(slot)
        result.stopped.append(Stopped(slot, reason, detail))

    def _free(self, slot: int) -> None:
        if self._stopped[slot]:
            self._idle -= 1
        else:
            self._tables.leave(slot)
        for token in self._stop_ids[slot]:
            self._watchers[token] -= 1
            if not self._watchers[token]:
                del self._watchers[token]
                self._watched[token] = False
        self._stop_ids[slot] = frozenset()
        self._tables.clear(slot)
        self.arrays.known[slot] = self.arrays.computed[slot] = 0
        self.arrays.sampling[slot] = None
        self._decoding[slot] = self._stopped[slot] = False
        self._live -= 1
