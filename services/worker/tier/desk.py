"""Rank 0's event loop and the second tier: offers come in, fetches end, and the scheduler is told."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from services.worker.compute import Compute, FetchEnd
from services.worker.runner import Runner
from services.worker.tier.arrivals import Key
from services.worker.tier.endings import Endings
from services.worker.tier.homes import Homes, TierState
from shared.wire import Step, TierOffer

LOOK_EVERY_S = 0.5

SETTLE_S = 0.5

CONNECT_S = 2.0

CHANGE = 0.1
"""Rates are told anew when one has changed by so much of itself."""


class TierListener(Protocol):
    """Told on the event loop."""

    def fetch_ended(self, end: FetchEnd) -> None: ...

    def tier_changed(self, row: str, fixed_s: float, block_s: float) -> None:
        """Where blocks go now (empty: nowhere), and what a fetch from there takes."""


class TierDesk:
    """Of an instance, whether its blocks can be kept elsewhere or not: every fetch is answered."""

    def __init__(self, runner: Runner, compute: Compute, homes: Homes, listener: TierListener) -> None:
        """`homes`: what was heard of before there was an executor."""
        self._runner = runner
        self._tier = compute.tier
        self._listener = listener
        self._homes = homes
        self._endings = Endings(1 if compute.relay is None else compute.relay.size)
        self._told = TierState()
        self._announced = ("", 0.0, 0.0)
        self._reached = asyncio.Event()
        # or found out that it is not to be had
        self._measuring: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def soon(callback: Callable[..., None], *args: Any) -> None:
            try:
                loop.call_soon_threadsafe(callback, *args)
            except RuntimeError:
                pass  # the loop is closed: the process ends

        if self._tier is not None:
            self._tier.when(
                fetched=lambda key, count, us: soon(self._on_part, 0, key, count, us),
                reached=lambda: soon(self._on_reached),
            )
        if compute.relay is not None:
            compute.relay.when_fetched(lambda *part: soon(self._on_part, *part))

    def begin(self, frame: Step) -> None:
        """The frame was handed to the runner."""
        now = time.monotonic()
        for fetch in frame.fetch:
            key = frame.incarnation, fetch.op
            if self._tier is None:
                self._end(key, 0, 0)
            else:
                self._endings.begin(key, now)

    def forget(self) -> None:
        """The session is over."""
        self._endings.forget()

    def on_offer(self, offer: TierOffer) -> None:
        if self._homes.hear(offer, time.monotonic()):
            for each in self._homes.unmeasured():
                task = asyncio.ensure_future(self._measure(each))
                self._measuring.add(task)
                task.add_done_callback(self._measuring.discard)
            self._look()

    async def settle(self) -> None:
        """Until the tier heard of has been tried, but not for long: whoever claims the instance knows then
        what can be fetched."""
        self._look()
        if self._told.home:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reached.wait(), SETTLE_S)

    async def watch(self) -> None:
        """For ever: who falls silent, what takes too long, and rates that change."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            self._homes.expire(now)
            self._look()
            for key, fetched in self._endings.expire(now):
                structlog.get_logger().warning("fetch took too long", op=fetched.op)
                self._end(key, 0, fetched.us)

    def report(self) -> dict[str, Any]:
        """For status: of rank 0."""
        if self._tier is None:
            return {}
        return {"home": self._told.home, "used": self._told.wanted} | self._tier.report()

    def _look(self) -> None:
        """Tell the ranks and the scheduler what has changed."""
        if self._tier is None:
            return
        home = self._homes.home()
        so_far = self._told.wanted and self._told.home == home
        wanted = bool(home) and self._tier.wants(home, so_far)
        state = TierState(self._homes.offers(), home, wanted)
        if state != self._told:
            if (home, wanted) != (self._told.home, self._told.wanted):
                structlog.get_logger().info("second tier", home=home, used=wanted, **self._tier.report())
            self._told = state
            self._runner.ask(lambda compute: compute.use_tiers(state), lambda _: None)
        news = (home, *self._tier.rates()) if wanted else ("", 0.0, 0.0)
        if news[0] != self._announced[0] or any(
            abs(new - old) > CHANGE * old for new, old in zip(news[1:], self._announced[1:], strict=True)
        ):
            self._announced = news
            self._listener.tier_changed(*news)

    async def _measure(self, offer: TierOffer) -> None:
        """The time a connection takes, best of three: about one round trip."""
        best = float("inf")
        for _ in range(3):
            began = time.monotonic()
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(offer.host, offer.port)
            except (OSError, TimeoutError):
                return
            best = min(best, time.monotonic() - began)
            writer.close()
        self._homes.measured(offer, best)
        self._look()

    def _on_reached(self) -> None:
        self._reached.set()
        self._look()

    def _on_part(self, rank: int, key: Key, count: int, us: int) -> None:
        fetched = self._endings.said(rank, key, count, us)
        if fetched is not None:
            self._end(key, fetched.count, fetched.us)

    def _end(self, key: Key, count: int, us: int) -> None:
        def told(end: FetchEnd | None) -> None:
            if end is not None:
                self._listener.fetch_ended(end)

        self._runner.ask(lambda compute: compute.end_fetch(key, count, us), told)
