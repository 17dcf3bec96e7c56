"""`python -m tests.support.group_process`: rank 0 of a group of mocks as a process of its own, no mesh.

It takes the worker's settings from the environment, prints one JSON line with the ranks' pids once the group
has computed its first steps, and goes on computing steps of `mock_step_s` until it is killed or told to stop.
"""

import asyncio
import json
import signal

from services.worker.settings import WorkerSettings
from shared.runtime.settings import load
from shared.wire import Sampling
from tests.support.running_worker import running


async def main() -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with running(load(WorkerSettings), start_s=60) as worker:
        scheduler = worker.scheduler()
        await scheduler.connect()
        await scheduler.generate([[1, 2]], [Sampling(max_tokens=3)])
        print(json.dumps({"ranks": worker.service.stats()["detail"]["ranks"]}), flush=True)
        while not stopping.is_set() and not worker.task.done():
            generating = asyncio.ensure_future(scheduler.generate([[1, 2]], [Sampling(max_tokens=50)]))
            told = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({generating, told, worker.task}, return_when=asyncio.FIRST_COMPLETED)
            for task in (generating, told):
                task.cancel()
            await asyncio.gather(generating, told, return_exceptions=True)
        if worker.task.done():
            await worker.task


if __name__ == "__main__":
    asyncio.run(main())
