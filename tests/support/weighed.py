"""A rank's ledger in a process of its own: `python -m tests.support.weighed MODEL KV_BYTES [NAME=VALUE…]`.

A process that computed other things before has more than a worker has; this one imports what a worker does.
"""

import json
import subprocess
import sys
from typing import Any


def weighed(model: str, kv_bytes: int, real: bool = False, **options: Any) -> dict[str, Any]:
    """`predicted` and `measured` bytes by class, `start_s` that the account took,
    `cpu_s` of computing among them, and where a `real` step is
    computed, the widest, `real_total_bytes`: the highest that the process came to in it."""
    words = [f"{name}={json.dumps(value)}" for name, value in ({"real": real} | options).items()]
    done = subprocess.run(
        [sys.executable, "-m", __name__, model, str(kv_bytes), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(model: str, kv_bytes: int, options: dict[str, Any]) -> dict[str, Any]:
    import time

    import services.worker.__main__  # noqa: F401 - all that a worker imports
    from services.worker.engine import executor as engine
    from services.worker.engine.accounting import account_for
    from services.worker.engine.runtime_memory import runtime_bytes
    from shared.model import resolve

    real, took, cpu = options.pop("real"), 0.0, 0.0

    def timed(*args: Any) -> Any:
        nonlocal took, cpu
        begun, used = time.perf_counter(), time.process_time()
        account = account_for(*args)
        took, cpu = time.perf_counter() - begun, time.process_time() - used
        return account

    engine.account_for = timed
    made = engine.EngineOptions(kv_bytes=kv_bytes, runtime_bytes=runtime_bytes(), **options)
    built = engine.TorchExecutor(resolve(model).path, made)
    account = built.account
    assert account is not None
    assert account.measured is not None
    told = dict(built.info.detail)
    found = account.as_dict() | {
        "start_s": took,
        "cpu_s": cpu,
        "blocks": told["blocks"],
        "choice": told["choice"],
    }
    return found | ({"real_total_bytes": widest_step(built, made)} if real else {})


def widest_step(built: Any, options: Any) -> int:
    """Bytes that the process has at the most while it computes the widest step."""
    from services.worker.engine.resident import Peak, give_back, resident
    from shared.wire import Sampling
    from tests.unit.engine_support import Driver

    driver = Driver(built, options.slots)
    counts = [1] * min(options.slots, options.most_tokens)
    counts[-1] = min(options.most_tokens - len(counts) + 1, built.info.max_len - 1)
    for slot, count in enumerate(counts):
        driver.admit(slot, [7] * count, Sampling(max_tokens=1, seed=slot, top_p=0.9, logprobs=5))
    give_back()
    peak = Peak()
    driver.step(dict(enumerate(counts)))
    now = resident()
    return peak.before.private + peak.grown() + now.files + now.shared + int(options.staging_bytes)


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[3:])
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), {n: json.loads(v) for n, v in given.items()})))
