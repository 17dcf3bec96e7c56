"""Run a coroutine as far as it goes without a task: most ASGI calls have nothing to wait for."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def start(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """(True, its result), or (False, what it waits for): then `finish` it. Raises what it raises."""
    try:
        return False, coroutine.send(None)
    except StopIteration as stop:
        return True, stop.value


async def finish(coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> Any:
    """The result of a coroutine that `start` left waiting; closes it when cancelled."""
    try:
        while True:
            if waits_for is None:
                await asyncio.sleep(0)
            else:
                # What a task does with the future that a coroutine yields.
                waits_for._asyncio_future_blocking = False
                await asyncio.wait((waits_for,))
            try:
                waits_for = coroutine.send(None)
            except StopIteration as stop:
                return stop.value
    finally:
        coroutine.close()
