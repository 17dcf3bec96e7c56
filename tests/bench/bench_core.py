"""Microseconds of scheduler core per steady decode step: one result taken in, tokens out, next frame planned.

`python tests/bench/bench_core.py` prints one line per batch size. No assertions: read the figures.
"""

import gc
import random
import statistics
import sys
import time

from services.scheduler.admission import ExpectedOutput
from services.scheduler.core import Core, Rules
from services.scheduler.events import AskClaim, ClaimAnswer, SendStep, SendTokens, Tick, Turn
from services.scheduler.policy import ContinuousPolicy
from shared.wire import (
    Ack,
    Beat,
    Claimed,
    Codec,
    Done,
    InstanceInfo,
    Sampling,
    Step,
    StepTiming,
    Submit,
    SubmitSeq,
    Tokens,
    encode,
)

PROMPT, OUTPUT, BLOCK = 32, 4000, 16
ACK_EVERY = 250


class Bench:
    """A core with one instance whose results are made as fast as they are asked for."""

    def __init__(self, slots: int) -> None:
        self.now = 100.0
        self.core = Core(
            "owner", Rules("bench"), ContinuousPolicy(), ExpectedOutput(), rng=random.Random(1), now=self.now
        )
        blocks = slots * (-(-(PROMPT + OUTPUT) // BLOCK) + 1)
        self.info = InstanceInfo(
            "w0", "bench", "f", "mixed", "ready", 1, BLOCK, blocks, slots, 8192, 50_000, 8192, 1e6, 1e-4
        )
        self.steps: list[Step] = []
        self.last: Tokens | None = None
        self.known = dict.fromkeys(range(slots), 0)
        self.started: dict[int, int] = {}

    def handle(self, event: object) -> None:
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, SendStep):
                self.steps.append(effect.step)
            elif isinstance(effect, SendTokens):
                self.last = effect.tokens
            elif isinstance(effect, AskClaim):
                claim = effect.claim
                self.handle(
                    ClaimAnswer("w0", Claimed(ok=True, epoch=claim.epoch, owner=claim.owner, incarnation=7,
                                              info=self.info, claim_id=claim.claim_id))
                )  # fmt: skip

    def beat(self) -> None:
        leadership = self.core.leadership
        self.handle(Beat(info=self.info, incarnation=7 if self.core.leads else 1, epoch=leadership.epoch,
                         owner="owner" if leadership.epoch else "", seen_seq=0, done_seq=0))  # fmt: skip

    def start(self, sequences: int) -> None:
        """Until all sequences decode."""
        for _ in range(40):
            self.now += 0.05
            self.beat()
            self.handle(Tick())
            self.turn()
        for number in range(sequences):
            sampling = Sampling(max_tokens=OUTPUT, seed=number)
            self.handle(Submit(client="c", request_id=f"r{number}", prompt=[number] * PROMPT,
                               seqs=[SubmitSeq(number, 0)], sampling=sampling))  # fmt: skip
        while len(self.started) < sequences or self.core.fleet.instances["w0"].prefilling:
            self.turn()

    def turn(self) -> None:
        self.handle(Turn())
        while self.steps:
            done = self.result(self.steps.pop(0))
            self.now += 0.001
            self.handle(done)
            self.handle(Turn())
            if len(self.started) and not any(s.work or s.admit for s in self.steps):
                return

    def result(self, step: Step) -> Done:
        for admit in step.admit:
            self.started[admit.slot] = step.seq
        for slot in step.release:
            self.started.pop(slot, None)
        slots = [] if any(work.count for work in step.work) else list(self.started)
        if step.work:
            # A prompt in one chunk draws its first token.
            slots = [work.slot for work in step.work] + [s for s in self.started if s not in
                                                        {work.slot for work in step.work}]  # fmt: skip
        return Done(
            instance="w0", epoch=step.epoch, owner=step.owner, incarnation=7, seq=step.seq, slots=slots,
            tokens=[17] * len(slots), timing=StepTiming(1000, 100, 0, 0, len(slots)),
        )  # fmt: skip


def measure(sequences: int, rounds: int) -> tuple[float, float, float]:
    """(mean, median, with both codecs) microseconds a step."""
    bench = Bench(max(sequences, 4))
    canary_over(bench)
    bench.start(sequences)
    decoder = Codec(Done)
    core, times, coded = bench.core, [], []
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        step = bench.steps.pop(0)
        payload = encode(bench.result(step))
        bench.now += 0.001
        began = time.perf_counter()
        done = decoder.decode(payload)
        decoded = time.perf_counter()
        effects = core.handle(done, bench.now)
        effects += core.handle(Turn(), bench.now)
        ended = time.perf_counter()
        for effect in effects:
            if isinstance(effect, SendStep):
                encode(effect.step)
                bench.steps.append(effect.step)
            elif isinstance(effect, SendTokens):
                encode(effect.tokens)
                bench.last = effect.tokens
        sent = time.perf_counter()
        times.append(ended - decoded)
        coded.append(sent - began)
        if number % ACK_EVERY == 0 and bench.last is not None:
            core.handle(Ack(client="c", epoch=1, owner="owner", seq=bench.last.seq), bench.now)
            core.handle(Tick(), bench.now)
    return 1e6 * statistics.fmean(times), 1e6 * statistics.median(times), 1e6 * statistics.fmean(coded)


def canary_over(bench: Bench) -> None:
    """The canary ends by a stop of its own, as an instance would say."""
    inner = bench.result

    def result(step: Step) -> Done:
        done = inner(step)
        sequence = bench.core.fleet.instances["w0"].table
        for slot in done.slots:
            if (held := sequence[slot]) is not None and len(held.out) + 1 >= held.request.sampling.max_tokens:
                from shared.wire import Stopped

                done.stopped.append(Stopped(slot, "length"))
        return done

    bench.result = result  # type: ignore[method-assign]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print(f"{'sequences':>9}  {'mean us':>8}  {'median us':>9}  {'with codecs us':>14}")
    for sequences in (8, 32, 64, 256):
        mean, median, coded = measure(sequences, rounds)
        print(f"{sequences:9d}  {mean:8.1f}  {median:9.1f}  {coded:14.1f}")


if __name__ == "__main__":
    main()
