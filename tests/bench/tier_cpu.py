"""What filling the second tier takes of the processors beside computing a prompt, in one process and a tier.

`python -m tests.bench.tier_cpu [--model NAME] [--tokens N] [--rounds N]` computes fresh prompts whose blocks
go to a tier in a process of its own or, in turns, do not. It prints a JSON line: the least wall seconds of a
prompt each way, and the CPU seconds that its blocks take here and there beside those of computing it.
"""

import argparse
import json
import multiprocessing
import random
import time

from services.worker.collective.port import LOOPBACK
from services.worker.compute import Compute, Outcome
from services.worker.executors import batch_for, build_executor, tier_for
from services.worker.settings import WorkerSettings
from services.worker.tier.homes import TierState
from shared.model.resolve import resolve
from shared.subjects import tier_row
from shared.wire import Admit, Sampling, Step, TierOffer, Work
from tests.bench.tier_rates import SECRET, serve

MODEL = "m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    here, there = multiprocessing.Pipe()
    memory = 1 << 30
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, memory, 0, ""))
    server.start()
    offer = TierOffer(
        instance="k0",
        host="127.0.0.1",
        port=here.recv(),
        secret=SECRET,
        born=1,
        memory_bytes=memory,
        disk_bytes=0,
    )
    settings = WorkerSettings(
        model=MODEL, model_dir=str(resolve(told.model).path), instance="w0", max_len=8192
    )
    executor = build_executor(settings, LOOPBACK)
    tier = tier_for(settings, executor)
    if tier is None:
        raise SystemExit("this executor has no blocks to keep")
    compute = Compute(executor, batch_for(settings, executor.info), tier=tier)
    compute.session = 1
    rng = random.Random(1)
    number = 0

    def step(**content: object) -> None:
        nonlocal number
        number += 1
        frame = Step(instance="w0", epoch=1, owner="o", incarnation=1, seq=number, **content)  # type: ignore[arg-type]
        outcome = compute.step(frame, time.perf_counter())
        assert isinstance(outcome, Outcome)
        assert not any(row.reason == "error" for row in outcome.done.stopped), outcome.done.stopped

    def prompt() -> float:
        """Seconds of a fresh prompt, computed in chunks."""
        ids = [rng.randrange(1000, 40000) for _ in range(told.tokens)]
        blocks = list(range(-(-told.tokens // executor.info.block_tokens) + 1))
        began = time.perf_counter()
        admit = [Admit(0, 0, told.tokens, ids, 0, blocks, Sampling(max_tokens=4, seed=1))]
        for start in range(0, told.tokens, told.chunk):
            step(admit=admit, work=[Work(0, min(told.chunk, told.tokens - start))])
            admit = []
        took = time.perf_counter() - began
        step(release=[0])
        return took

    def cpu_there() -> float:
        here.send("")
        seconds: float = here.recv()
        return seconds

    def cpu_of(wanted: bool) -> tuple[float, float, float]:
        """(wall, CPU here, CPU there) of one prompt, and of bringing its blocks to the tier."""
        compute.use_tiers(TierState((offer,), tier_row("k0", MODEL), wanted))
        mine, theirs = time.process_time(), cpu_there()
        took = prompt()
        while tier.report()["waiting"]:
            time.sleep(0.01)
        return took, time.process_time() - mine, cpu_there() - theirs

    prompt()
    cpu_of(True)
    off, on = zip(*((cpu_of(False), cpu_of(True)) for _ in range(told.rounds)), strict=True)
    report = tier.report()
    without, with_tier = min(row[0] for row in off), min(row[0] for row in on)
    cpu = min(row[1] for row in off)
    print(
        json.dumps(
            {
                "tokens": told.tokens,
                "without_s": round(without, 3),
                "with_s": round(with_tier, 3),
                "slower": round(with_tier / without - 1, 4),
                "cpu_s": round(cpu, 3),
                "cpu_more_here_s": round(min(row[1] for row in on) - cpu, 3),
                "cpu_there_s": round(min(row[2] for row in on), 3),
                "sent": report["sent"],
                "saved": report["saved"],
                "dropped": report["dropped"],
            }
        )
    )
    compute.close()
    here.send(None)
    server.join()


if __name__ == "__main__":
    main()
