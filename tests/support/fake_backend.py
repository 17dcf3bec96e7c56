"""A scheduler and worker in one, on a bus: answers each `Submit` with scripted tokens, one step at a time.

The script decides per request; the default repeats the tokens of a sentence until max_tokens. Frames carry
every running sequence, as the real scheduler's do.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.bus.port import Bus
from shared.subjects import ACK, BEACON, CANCEL, SUBMIT, TOKENS
from shared.wire import (
    Ack,
    Answer,
    Beacon,
    Cancel,
    EndRow,
    FinishReason,
    LogprobRow,
    PromptLogprobRow,
    SeqTimes,
    Submit,
    TokenRow,
    Tokens,
)


@dataclass
class Script:
    """What becomes of one request."""

    ids: Sequence[int] = (5, 6, 7)
    """Repeated until `max_tokens`; a stop id ends the sequence."""
    refuse: Answer | None = None
    ends: FinishReason | None = None
    """End like this after the first pass through `ids`, whatever else holds."""
    hang_after: int | None = None
    """Say nothing more after so many tokens."""
    per_frame: int = 1


@dataclass
class _Seq:
    submit: Submit
    handle: int
    choice: int
    done: list[int]
    script: Script


@dataclass
class FakeBackend:
    """`async with FakeBackend(bus, model):` runs it; read `submits` and `cancels` to see what arrived."""

    bus: Bus
    model: str
    script: Callable[[Submit], Script] = lambda _: Script()
    step_s: float = 0.0
    """Pause between steps; 0 only yields to the loop."""
    epoch: int = 1
    owner: str = "fake"
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    silent: bool = False
    """Take nothing and say nothing, like a dead scheduler."""

    def __post_init__(self) -> None:
        self._seqs: dict[tuple[str, int], _Seq] = {}
        self._known: dict[tuple[str, str], Answer] = {}
        self._next: dict[str, int] = {}
        self._answers: dict[str, list[Answer]] = {}
        self._ends: dict[str, list[EndRow]] = {}
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        """Sequences of clients' requests; a gateway's canary, which comes at any time, doesn't count."""
        return sum(not seq.submit.request_id.startswith("canary") for seq in self._seqs.values())

    async def __aenter__(self) -> "FakeBackend":
        self._subscriptions = [
            await self.bus.subscribe(SUBMIT.at(model=self.model), self._on_submit),
            await self.bus.subscribe(CANCEL.at(model=self.model), self._on_cancel),
            await self.bus.subscribe(ACK.every(), self.acks.append),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._steps()), loop.create_task(self._beacons())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def take_over(self) -> None:
        """Another scheduler leads, which knows nothing of what ran."""
        self.epoch += 1
        self._seqs.clear()
        self._known.clear()
        self._next.clear()
        self._answers.clear()
        self._ends.clear()

    def _on_submit(self, submit: Submit) -> None:
        if self.silent:
            return
        key = (submit.client, submit.request_id)
        answer = self._known.get(key)
        if answer is None:
            self.submits.append(submit)
            script = self.script(submit)
            answer = script.refuse or Answer(submit.request_id, "accepted")
            answer = Answer(submit.request_id, answer.code, answer.message, answer.retry_after_s)
            self._known[key] = answer
            if script.refuse is None:
                for seq in submit.seqs:
                    state = _Seq(submit, seq.handle, seq.choice, list(seq.accepted), script)
                    self._seqs[submit.client, seq.handle] = state
        self._answers.setdefault(submit.client, []).append(answer)
        self._wake.set()

    def _on_cancel(self, cancel: Cancel) -> None:
        if self.silent:
            return
        self.cancels.append(cancel)
        mine = [
            s
            for s in self._seqs.values()
            if s.submit.client == cancel.client
            and s.submit.request_id == cancel.request_id
            and (not cancel.handles or s.handle in cancel.handles)
        ]
        for seq in mine:
            del self._seqs[cancel.client, seq.handle]
            self._ends.setdefault(cancel.client, []).append(self._end(seq, "cancelled"))
        if not mine:
            answer = Answer(cancel.request_id, "unknown_request")
            self._answers.setdefault(cancel.client, []).append(answer)
        self._wake.set()

    async def _beacons(self) -> None:
        while True:
            if not self.silent:
                clients = dict(self._next)
                beacon = Beacon(model=self.model, epoch=self.epoch, owner=self.owner, clients=clients)
                await self.bus.publish(BEACON.at(), beacon)
            await asyncio.sleep(0.1)

    async def _steps(self) -> None:
        while True:
            if not (self._seqs or self._answers or self._ends) or self.silent:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self.step_s)
            await self._step()

    async def _step(self) -> None:
        rows: dict[str, list[TokenRow]] = {}
        logprobs: dict[str, list[LogprobRow]] = {}
        prompt_logprobs: dict[str, list[PromptLogprobRow]] = {}
        answers, self._answers = self._answers, {}
        ends, self._ends = self._ends, {}
        for key, seq in list(self._seqs.items()):
            client = seq.submit.client
            if seq.script.hang_after is not None and len(seq.done) >= seq.script.hang_after:
                continue
            if not seq.done and (row := _prompt_logprobs(seq)) is not None:
                prompt_logprobs.setdefault(client, []).append(row)
            index = len(seq.done)
            reason = self._advance(seq)
            ids = seq.done[index:]
            rows.setdefault(client, []).append(TokenRow(seq.handle, 1, index, ids))
            wanted = seq.submit.sampling.logprobs
            if wanted is not None:
                top = [
                    [(token, -0.5), *((i + 3, -1.0 - i) for i in range(wanted - 1))][:wanted] for token in ids
                ]
                logprobs.setdefault(client, []).append(LogprobRow(seq.handle, index, [-0.5] * len(ids), top))
            if reason is not None:
                del self._seqs[key]
                ends.setdefault(client, []).append(self._end(seq, reason))
        for client in {*rows, *answers, *ends}:
            self._next[client] = self._next.get(client, 0) + 1
            frame = Tokens(
                epoch=self.epoch,
                owner=self.owner,
                seq=self._next[client],
                answers=answers.get(client, []),
                rows=rows.get(client, []),
                logprobs=logprobs.get(client, []),
                prompt_logprobs=prompt_logprobs.get(client, []),
                ends=ends.get(client, []),
            )
            await self.bus.publish(TOKENS.at(client=client), frame)

    def _advance(self, seq: _Seq) -> FinishReason | None:
        sampling = seq.submit.sampling
        for _ in range(seq.script.per_frame):
            token = seq.script.ids[len(seq.done) % len(seq.script.ids)]
            seq.done.append(token)
            if token in sampling.stop_token_ids and len(seq.done) > sampling.min_tokens:
                return "stop"
            if len(seq.done) >= sampling.max_tokens:
                return "length"
            if seq.script.ends is not None and len(seq.done) >= len(seq.script.ids):
                return seq.script.ends
        return None

    def _end(self, seq: _Seq, reason: FinishReason) -> EndRow:
        times = SeqTimes(queue_s=0.001, prefill_s=0.002, decode_s=0.003)
        message = "scripted" if reason in ("error", "timeout") else ""
        return EndRow(seq.handle, 1, reason, len(seq.done), 1, message, times)


def _prompt_logprobs(seq: _Seq) -> PromptLogprobRow | None:
    wanted = seq.submit.sampling.prompt_logprobs
    if wanted is None:
        return None
    rest = seq.submit.prompt[1:]
    top = [[(token, -0.25), *((i + 3, -1.0 - i) for i in range(wanted - 1))][:wanted] for token in rest]
    return PromptLogprobRow(seq.handle, 1, [-0.25] * len(rest), top)
