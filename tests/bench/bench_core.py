"""Microseconds of scheduler core per steady decode step: one result taken in, tokens out, next frame planned.

`python tests/bench/bench_core.py [steps]` prints one line per batch size. No assertions: read the figures.
CPU time is of this thread, so it holds on a busy machine too; the median is wall-clock time.
"""

import gc
import random
import statistics
import sys
import time
from collections import deque

from services.scheduler.admission import ExpectedOutput
from services.scheduler.core import Core, Rules
from services.scheduler.events import AskClaim, ClaimAnswer, SendStep, SendTokens, Tick, Turn
from services.scheduler.policy import ContinuousPolicy
from shared.subjects import DONE
from shared.wire import (
    Ack,
    Beat,
    Claimed,
    Done,
    InstanceInfo,
    Sampling,
    Step,
    StepTiming,
    Stopped,
    Submit,
    SubmitSeq,
    encode,
)

PROMPT, BLOCK = 32, 16
ACK_EVERY = 4
"""Steps between acknowledgements, as the client side of the protocol has it; a tick comes with each."""


class Bench:
    """A core and one instance that answers each frame at once; every sequence decodes for ever."""

    def __init__(self, slots: int, output: int) -> None:
        self.now = 100.0
        self.core = Core(
            "o", Rules("bench"), ContinuousPolicy(), ExpectedOutput(), rng=random.Random(1), now=self.now
        )
        blocks = (slots + 1) * (-(-(PROMPT + output) // BLOCK) + 1)
        self.output = output
        self.info = InstanceInfo(
            "w0", "bench", "f", "mixed", "ready", 1, BLOCK, blocks, slots, 1 << 20, 50_000, 1 << 20, 1e6, 1e-4
        )
        self.frames: deque[Step] = deque()
        self.acked = 0
        self._left: dict[int, int] = {}
        """Running slot → tokens until its limit."""

    def handle(self, event: object) -> None:
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, SendStep):
                self.frames.append(effect.step)
            elif isinstance(effect, SendTokens):
                self.acked = effect.tokens.seq
            elif isinstance(effect, AskClaim):
                claim = effect.claim
                claimed = Claimed(
                    ok=True,
                    epoch=claim.epoch,
                    owner="o",
                    incarnation=7,
                    info=self.info,
                    claim_id=claim.claim_id,
                )
                self.handle(ClaimAnswer("w0", claimed))

    def start(self, sequences: int) -> None:
        """Lead, pass the canary, and run until all sequences decode."""
        while not self.core.fleet.choices:
            self.now += 0.1
            epoch = self.core.leadership.epoch
            beat = Beat(
                info=self.info, incarnation=7, epoch=epoch, owner="o" if epoch else "", seen_seq=0, done_seq=0
            )
            self.handle(beat)
            self.handle(Tick())
            self.step()
        for number in range(sequences):
            submit = Submit(
                client="c",
                request_id=f"r{number}",
                prompt=[number] * PROMPT,
                seqs=[SubmitSeq(number, 0)],
                sampling=Sampling(max_tokens=self.output),
            )
            self.handle(submit)
        while self.core.fleet.instances["w0"].decoding < sequences:
            self.step()
        for _ in range(8):
            self.step()

    def acknowledge(self) -> None:
        self.core.handle(Ack(client="c", epoch=1, owner="o", seq=self.acked), self.now)

    def step(self) -> None:
        self.acknowledge()
        self.handle(Turn())
        if self.frames:
            self.now += 0.001
            self.handle(self.result(self.frames.popleft()))
            self.handle(Turn())

    def result(self, step: Step) -> Done:
        """What an instance would say: a token for every slot, prompts computed in one chunk."""
        for slot in step.release:
            self._left.pop(slot, None)
        for admit in step.admit:
            self._left[admit.slot] = admit.sampling.max_tokens
        slots = [slot for slot, left in self._left.items() if left > 0]
        stopped = []
        for slot in slots:
            self._left[slot] -= 1
            if not self._left[slot]:
                stopped.append(Stopped(slot, "length"))
        return Done(
            instance="w0",
            epoch=step.epoch,
            owner="o",
            incarnation=7,
            seq=step.seq,
            slots=slots,
            tokens=[17_000 + slot for slot in slots],
            stopped=stopped,
            timing=StepTiming(1000, 100, 0, 0, len(slots)),
        )


def measure(sequences: int, steps: int) -> tuple[float, float, float]:
    """(CPU mean, wall median, CPU mean with decoding and encoding of frames), microseconds a step."""
    bench = Bench(sequences, steps + 100)
    bench.start(sequences)
    core, median_of = bench.core, []
    cpu = cpu_coded = 0
    gc.collect()
    gc.freeze()
    for number in range(steps):
        if not bench.frames:
            raise RuntimeError("nothing in flight: the core waits for an acknowledgement")
        payload = encode(bench.result(bench.frames.popleft()))
        bench.now += 0.001
        begun = time.thread_time_ns()
        done = DONE.codec.decode(payload)
        decoded = time.thread_time_ns()
        wall = time.perf_counter_ns()
        effects = core.handle(done, bench.now) + core.handle(Turn(), bench.now)
        median_of.append(time.perf_counter_ns() - wall)
        planned = time.thread_time_ns()
        for effect in effects:
            if isinstance(effect, SendStep):
                encode(effect.step)
                bench.frames.append(effect.step)
            elif isinstance(effect, SendTokens):
                encode(effect.tokens)
                bench.acked = effect.tokens.seq
        cpu += planned - decoded
        cpu_coded += time.thread_time_ns() - begun
        if number % ACK_EVERY == 0:
            bench.acknowledge()
            core.handle(Tick(), bench.now)
    return cpu / steps / 1e3, statistics.median(median_of) / 1e3, cpu_coded / steps / 1e3


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("us per step   cpu mean   wall median   cpu mean with codecs")
    for sequences in (8, 32, 64, 256):
        cpu, median, coded = measure(sequences, steps)
        print(f"{sequences:4d} sequences {cpu:9.1f} {median:13.1f} {coded:22.1f}")


if __name__ == "__main__":
    main()
