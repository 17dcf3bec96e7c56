"""A core with instances that really apply its frames (the worker's batch checks each), step by step."""

import random
from collections import deque
from typing import Any

import numpy as np

from services.scheduler.admission import ExpectedOutput, Reservation
from services.scheduler.core import Core, Rules
from services.scheduler.events import (
    AskClaim,
    ClaimAnswer,
    Effect,
    SendBeacon,
    SendStep,
    SendTokens,
    Tick,
    Turn,
)
from services.scheduler.fleet import FleetRules
from services.scheduler.policy import BatchPolicy, ContinuousPolicy
from services.worker.compute import Compute, Outcome
from services.worker.slots import Batch, BatchShape
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from shared.wire import (
    Ack,
    Beat,
    Claimed,
    Done,
    EndRow,
    InstanceInfo,
    Sampling,
    Step,
    StepTiming,
    Submit,
    SubmitSeq,
)
from shared.wire import Tokens as TokensFrame

BLOCK = 4


class Counting:
    """Draws 100, 101, 102 … by position, so that a test can see where a sequence goes on."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        drawn = 100 + step.starts + step.counts - slots.prompt_len[step.slots]
        return StepOutput(np.where(step.samples, drawn, -1).astype(np.int32))

    def close(self) -> None:
        return


class FakeInstance:
    """The worker's side of one session, without gate and clock."""

    def __init__(self, name: str, **overrides: Any) -> None:
        fields: dict[str, Any] = {
            "instance": name, "model": "m", "fingerprint": "f", "role": "mixed", "state": "ready", "born": 1,
            "block_tokens": BLOCK, "blocks_total": 64, "max_slots": 8, "max_len": 256, "vocab_size": 1000,
            "max_step_tokens": 4096, "prefill_tok_s": 1e5, "decode_step_s": 0.02,
        }  # fmt: skip
        self.info = InstanceInfo(**(fields | overrides))
        info = self.info
        executor = Counting(
            ExecutorInfo("f", BLOCK, info.blocks_total, info.max_len, info.vocab_size, 1e5, 0.02)
        )
        shape = BatchShape(info.max_slots, info.max_len, BLOCK, info.blocks_total, info.vocab_size)
        self.compute = Compute(executor, Batch(shape, "f"))
        self.frames: deque[Step] = deque()
        self.incarnation = 1
        self.seen: list[Step] = []
        """Every frame ever received."""

    def claimed(self, ask: AskClaim) -> Claimed:
        self.incarnation += 1
        self.frames.clear()
        self.compute.session = self.incarnation
        blocks, after = self.compute.begin()
        return Claimed(
            ok=True,
            epoch=ask.claim.epoch,
            owner=ask.claim.owner,
            incarnation=self.incarnation,
            info=self.info,
            claim_id=ask.claim.claim_id,
            blocks=blocks,
            next_offset=after,
        )

    def result(self) -> Done:
        outcome = self.compute.step(self.frames.popleft(), 0.0)
        assert isinstance(outcome, Outcome), f"a frame contradicts the batch: {outcome}"
        done = outcome.done
        info, timing = self.info, done.timing
        run_s = (
            info.decode_step_s * (0.8 + 0.2 * timing.decode_tokens)
            + timing.prefill_tokens / info.prefill_tok_s
        )
        timing = StepTiming(int(1e6 * run_s), 0, 0, timing.prefill_tokens, timing.decode_tokens)
        return Done(**{f: getattr(done, f) for f in done.__struct_fields__} | {"timing": timing})


class Rig:
    def __init__(
        self,
        *instances: FakeInstance,
        policy: BatchPolicy | None = None,
        reservation: Reservation | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.now = 100.0
        self.instances = {i.info.instance: i for i in instances or (FakeInstance("w0"),)}
        self.core = Core(
            "me",
            rules or Rules("m", fleet=FleetRules(stall_s=1e9)),
            policy or ContinuousPolicy(),
            reservation or ExpectedOutput(),
            rng=random.Random(1),
            now=self.now,
        )
        self.frames: list[TokensFrame] = []
        self.effects: list[Effect] = []
        self.acking = True

    @property
    def w0(self) -> FakeInstance:
        return self.instances["w0"]

    def handle(self, event: Any) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, SendStep):
                instance = self.instances[effect.step.instance]
                instance.frames.append(effect.step)
                instance.seen.append(effect.step)
            elif isinstance(effect, SendTokens):
                self.frames.append(effect.tokens)
            elif isinstance(effect, AskClaim):
                self.handle(ClaimAnswer(effect.instance, self.instances[effect.instance].claimed(effect)))
        return effects

    def turn(self) -> None:
        self.handle(Turn())
        self.core.check()

    def beat(self, instance: FakeInstance) -> None:
        leadership = self.core.leadership
        self.handle(
            Beat(info=instance.info, incarnation=instance.incarnation, epoch=leadership.epoch,
                 owner="me" if leadership.epoch else "", seen_seq=0, done_seq=0)
        )  # fmt: skip

    def pass_time(self, seconds: float, beats: bool = True) -> None:
        """Ticks, beats and acknowledgements, without any step."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            if beats:
                for instance in self.instances.values():
                    self.beat(instance)
            self.acknowledge()
            self.handle(Tick())
            self.turn()

    def acknowledge(self) -> None:
        if self.acking and self.frames:
            for name, client in self.core.desk.clients.items():
                self.handle(Ack(client=name, epoch=self.core.leadership.epoch, owner="me", seq=client.seq))

    def ready(self) -> "Rig":
        """Lead, and let every instance pass its canary."""
        self.pass_time(2.0)
        for _ in range(10):
            self.step()
            self.pass_time(0.1)
        self.effects.clear()
        self.frames.clear()
        for instance in self.instances.values():
            instance.seen.clear()
        return self

    def step(self) -> None:
        """Each instance computes one frame, if it has any."""
        self.now += 0.02
        self.acknowledge()
        self.handle(Tick())
        for instance in self.instances.values():
            if instance.frames:
                self.handle(instance.result())
        self.turn()

    def run(self, steps: int = 400) -> None:
        """Until nothing is in flight."""
        for _ in range(steps):
            if not any(instance.frames for instance in self.instances.values()):
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps")

    def submit(
        self,
        name: str,
        prompt: list[int] | int = 6,
        max_tokens: int = 5,
        *,
        n: int = 1,
        accepted: list[int] | None = None,
        sampling: dict[str, Any] | None = None,
        turn: bool = True,
        **fields: Any,
    ) -> None:
        """`prompt` as a number: that many ids that no other request shares."""
        base = sum(name.encode()) * 7 % 900
        ids = [(base + i) % 1000 for i in range(prompt)] if isinstance(prompt, int) else prompt
        handle = sum(byte << (8 * i) for i, byte in enumerate(name.encode()[:5])) * 10
        seqs = [SubmitSeq(handle + choice, choice, accepted or []) for choice in range(n)]
        self.handle(
            Submit(request_id=name, prompt=ids, seqs=seqs,
                   sampling=Sampling(max_tokens=max_tokens, **(sampling or {})), **({"client": "c"} | fields))
        )  # fmt: skip
        if turn:
            self.turn()

    # What clients got

    def handle_of(self, name: str, choice: int = 0) -> int:
        return sum(byte << (8 * i) for i, byte in enumerate(name.encode()[:5])) * 10 + choice

    def first_copies(self) -> list[TokensFrame]:
        """Frames without those sent again."""
        return list({frame.seq: frame for frame in reversed(self.frames)}.values())[::-1]

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        handle = self.handle_of(name, choice)
        rows = [row for frame in self.first_copies() for row in frame.rows if row.handle == handle]
        return [token for row in rows for token in row.ids]

    def end(self, name: str, choice: int = 0) -> EndRow | None:
        handle = self.handle_of(name, choice)
        ends = [end for frame in self.first_copies() for end in frame.ends if end.handle == handle]
        assert len(ends) <= 1, "more than one terminal row"
        return ends[0] if ends else None

    def answers(self, name: str) -> list[str]:
        return [answer.code for frame in self.frames for answer in frame.answers if answer.request_id == name]

    def beacons(self) -> list[SendBeacon]:
        return [effect for effect in self.effects if isinstance(effect, SendBeacon)]

    def at_rest(self) -> bool:
        self.core.check()
        return all(
            i.pool.free == i.pool.size and not i.running and not i.resting and not i.reserved
            for i in self.core.fleet.instances.values()
        ) and not len(self.core.desk.queue)
