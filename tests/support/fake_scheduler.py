"""A scheduler small enough to read: claims one worker over a bus and drives it, without queues or policy.

Tests use it to speak the protocol to a worker, benchmarks to drive an engine without the mesh in between.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared import subjects
from shared.bus.port import Bus
from shared.wire import (
    Admit,
    Beacon,
    Claim,
    Claimed,
    Done,
    Sampling,
    Step,
    Wire,
    Work,
)


@dataclass
class DrivenSequence:
    """One sequence as the driver sees it."""

    prompt: list[int]
    sampling: Sampling
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    # tokens computed by the frames sent so far
    tokens: list[int] = field(default_factory=list)
    finished: str = ""
    """`stop`, `length` or `error` once it has ended."""
    detail: str = ""


class FakeScheduler:
    """Drives instance `instance` on `bus`. `in_flight` frames are sent ahead of their results."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        *,
        epoch: int = 1,
        owner: str = "fake",
        model: str = "m",
        in_flight: int = 2,
    ) -> None:
        self.bus = bus
        self.instance = instance
        self.epoch = epoch
        self.owner = owner
        self.model = model
        self.in_flight = in_flight
        self.incarnation = 0
        self.seq = 0
        self.claimed: Claimed | None = None
        self.done: dict[int, Done] = {}
        self.heard: list[Wire] = []
        """Everything on the resync subject."""
        self.sent: list[Step] = []
        self._claims = itertools.count(1)
        self._news = asyncio.Event()

    async def connect(self) -> None:
        await self.bus.subscribe(subjects.DONE.at(instance=self.instance), self._on_done)
        await self.bus.subscribe(subjects.RESYNC.at(instance=self.instance), self._on_heard)

    async def ask(self, verb: str, message: Wire, timeout_s: float = 5.0) -> Any:
        to = subjects.INSTANCE.at(instance=self.instance, verb=verb)
        return await self.bus.request(to, message, reply=subjects.INSTANCE.reply_codec, timeout_s=timeout_s)

    async def claim(self, claim_id: str = "") -> Claimed:
        """Claim the instance; a new session begins when that is granted."""
        claim_id = claim_id or f"{self.owner}-{next(self._claims)}"
        answer: Claimed = await self.ask(
            "claim", Claim(epoch=self.epoch, owner=self.owner, claim_id=claim_id)
        )
        if answer.ok and answer.incarnation != self.incarnation:
            self.incarnation, self.seq = answer.incarnation, 0
            self.done.clear()
            self.sent.clear()
        self.claimed = answer
        return answer

    def frame(self, **content: Any) -> Step:
        """The next frame, not sent yet."""
        self.seq += 1
        step = Step(
            instance=self.instance,
            epoch=self.epoch,
            owner=self.owner,
            incarnation=self.incarnation,
            seq=self.seq,
            **content,
        )
        self.sent.append(step)
        return step

    async def send(self, step: Step) -> None:
        await self.bus.publish(subjects.STEP.at(instance=self.instance), step)

    async def step(self, **content: Any) -> Done:
        """Send the next frame and wait for its result."""
        frame = self.frame(**content)
        await self.send(frame)
        return await self.result(frame.seq)

    async def result(self, seq: int, timeout_s: float = 10.0) -> Done:
        async with asyncio.timeout(timeout_s):
            while seq not in self.done:
                self._news.clear()
                await self._news.wait()
        return self.done[seq]

    async def hear(
        self,
        kind: type[Wire],
        where: Callable[[Any], bool] = lambda _: True,
        *,
        times: int = 1,
        timeout_s: float = 5.0,
    ) -> Any:
        """The `times`-th message of this type on the resync subject for which `where` holds, now or later."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = [message for message in self.heard if isinstance(message, kind) and where(message)]
                if len(found) >= times:
                    return found[times - 1]
                self._news.clear()
                await self._news.wait()

    async def beacon(self, last: int | None = None, **changes: Any) -> None:
        """A beacon that lists the instance with frame `last` (default: the last one made)."""
        content: dict[str, Any] = {
            "model": self.model,
            "epoch": self.epoch,
            "owner": self.owner,
            "instances": {self.instance: (self.incarnation, self.seq if last is None else last)},
        }
        await self.bus.publish(subjects.BEACON.at(), Beacon(**content | changes))

    async def generate(
        self, prompts: list[list[int]], sampling: list[Sampling], *, chunk: int = 512
    ) -> list[DrivenSequence]:
        """Drive these sequences to their end, as many at once as slots and blocks allow."""
        if self.claimed is None:
            await self.claim()
        assert self.claimed is not None
        drive = _Drive(self.claimed, chunk)
        sequences = [DrivenSequence(list(prompt), how) for prompt, how in zip(prompts, sampling, strict=True)]
        drive.waiting.extend(sequences)
        pending: deque[int] = deque()
        while not all(sequence.finished for sequence in sequences):
            while len(pending) < self.in_flight and (content := drive.plan()) is not None:
                frame = self.frame(**content)
                pending.append(frame.seq)
                await self.send(frame)
            if not pending:
                raise RuntimeError(f"{len(drive.waiting)} sequences do not fit the instance")
            drive.learn(await self.result(pending.popleft()), still_open=len(pending))
        for seq in pending:
            drive.learn(await self.result(seq), still_open=0)
        await self.step(release=drive.release_all())
        return sequences

    def _on_done(self, done: Done) -> None:
        if done.incarnation == self.incarnation:
            self.done[done.seq] = done
            self._news.set()

    def _on_heard(self, message: Wire) -> None:
        self.heard.append(message)
        self._news.set()


class _Drive:
    """Slots and blocks of one `generate`: first come, first served, no sharing, all blocks at admission."""

    def __init__(self, claimed: Claimed, chunk: int) -> None:
        info = claimed.info
        self.waiting: deque[DrivenSequence] = deque()
        self._running: dict[int, DrivenSequence] = {}
        self._free_slots = list(range(info.max_slots))
        self._free_blocks = list(range(info.blocks_total))
        self._block_tokens = info.block_tokens
        self._max_len = info.max_len
        self._chunk = chunk
        self._ended: list[tuple[int, DrivenSequence]] = []
        # (results still open that name it, sequence): its blocks rest until then

    def plan(self) -> dict[str, Any] | None:
        """Content of the next frame; None when nothing can run."""
        release: list[int] = []
        for open_frames, sequence in list(self._ended):
            if not open_frames:
                release.append(sequence.slot)
                self._ended.remove((open_frames, sequence))
                self._recycle(sequence)
        admit = []
        while self.waiting and self._free_slots and len(self._free_blocks) >= self._needs(self.waiting[0]):
            admit.append(self._admit(self.waiting.popleft()))
        work = []
        moved = False
        for slot, sequence in self._running.items():
            left = len(sequence.prompt) - sequence.planned
            if left > 1:
                work.append(Work(slot, min(self._chunk, left)))
            if sequence.planned < self._most(sequence) - 1:
                sequence.planned += max(1, min(self._chunk, left))
                moved = True
        return {"admit": admit, "work": work, "release": release} if moved or release else None

    def learn(self, done: Done, still_open: int) -> None:
        self._ended = [(max(0, frames - 1), sequence) for frames, sequence in self._ended]
        for slot, token in zip(done.slots, done.tokens, strict=True):
            self._running[slot].tokens.append(token)
        for stopped in done.stopped:
            sequence = self._running.pop(stopped.slot)
            sequence.finished, sequence.detail = stopped.reason, stopped.detail
            self._ended.append((still_open, sequence))

    def release_all(self) -> list[int]:
        return [sequence.slot for _, sequence in self._ended]

    def _most(self, sequence: DrivenSequence) -> int:
        """Ids it may have at its end."""
        return min(len(sequence.prompt) + sequence.sampling.max_tokens, self._max_len)

    def _needs(self, sequence: DrivenSequence) -> int:
        return -(-self._most(sequence) // self._block_tokens)

    def _admit(self, sequence: DrivenSequence) -> Admit:
        sequence.slot = self._free_slots.pop(0)
        self._running[sequence.slot] = sequence
        sequence.blocks = [self._free_blocks.pop() for _ in range(self._needs(sequence))]
        return Admit(
            slot=sequence.slot,
            choice=0,
            prompt_len=len(sequence.prompt),
            ids=sequence.prompt,
            computed=0,
            blocks=sequence.blocks,
            sampling=sequence.sampling,
        )

    def _recycle(self, sequence: DrivenSequence) -> None:
        self._free_slots.append(sequence.slot)
        self._free_blocks += sequence.blocks
