"""What a group's communication costs: `hortator profile comm`, or `python -m services.worker.group.profile`.

Forms a group as the worker does, times every algorithm of sums anew, and prints one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from services.worker.collective.port import GroupLost
from services.worker.compute import Compute
from services.worker.executors import batch_for, build_executor
from services.worker.group.form import lead
from services.worker.settings import WorkerSettings
from shared.runtime import logs
from shared.runtime.settings import CannotStart, SettingsError

STEPS = (("decode, batch 1", 1), ("decode, batch 8", 8), ("decode, batch 32", 32))
CHUNKS = (128, 512, 2048)
"""Prompt tokens in a step."""


def profile_comm(settings: WorkerSettings) -> dict[str, Any]:
    """Measure a group of these settings. Raises `CannotStart`, `SettingsError`, and what building raises."""
    executor, relay = lead(settings, build_executor)
    compute = Compute(executor, batch_for(settings, executor.info), relay=relay)
    try:
        tuning = getattr(executor, "tuning", None)
        if tuning is None:
            raise CannotStart(
                "ranks that compute with torch alone do not choose algorithms: the native kernels are needed "
                f"({dict(executor.info.detail).get('kernels_reason', 'no reason known')})"
            )
        compute.measure("crossovers")
        steps = [*STEPS, *((f"prompt, {n} tokens", n) for n in CHUNKS if n <= settings.max_step_tokens)]
        return {
            "detail": dict(executor.info.detail) | relay.detail(),
            "communication": tuning.describe(),
            "steps": [{"step": name} | tuning.planned(tokens) for name, tokens in steps],
        }
    except GroupLost as error:
        raise CannotStart(str(compute.explained(error))) from error
    finally:
        compute.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status 2, with the reason, where it cannot be done."""
    parser = argparse.ArgumentParser(prog="services.worker.group.profile")
    parser.add_argument("model_dir")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cores", default="")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    logs.configure("profile", "comm", "warning")
    try:
        settings = WorkerSettings(
            instance="profile",
            model_dir=args.model_dir,
            tp=args.tp,
            dtype=args.dtype,
            threads=args.threads,
            cores=args.cores,
            device=args.device,
        )
        report = profile_comm(settings)
    except (CannotStart, SettingsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
