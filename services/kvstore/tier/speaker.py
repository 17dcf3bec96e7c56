"""What the tier says of itself: its offer to workers, and what it holds to whoever writes the index.

Each model's blocks are a row of the prefix index, for which the tier speaks as an instance does for itself.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from services.kvstore.tier.book import Book
from shared.bus.port import Bus, BusDown, Subscription
from shared.kv_events import GATHER_S, HEARTBEAT_S, KvEventLog
from shared.subjects import KV_EVENTS, KV_RESTATE, KV_TIER, Address, tier_row
from shared.wire import InstanceInfo, KvEvents, Restate, TierOffer, Wire

log = structlog.get_logger()

OFFER_EVERY_S = 1.0


class TierSpeaker:
    """`run` until cancelled, then `say_goodbye`. `changed` is set whenever `book` has changes to tell."""

    def __init__(self, bus: Bus, book: Book, changed: asyncio.Event, offer: TierOffer, version: str) -> None:
        self._bus = bus
        self._book = book
        self._changed = changed
        self._offer = offer
        self._version = version
        self._rows: dict[str, KvEventLog] = {}
        # model → account of its row
        self._subscriptions: list[Subscription] = []
        self._outgoing: asyncio.Queue[tuple[Address, Wire]] = asyncio.Queue()
        # A restate of a large tier is many megabytes: the broker takes it at its own pace, and in order.

    async def run(self) -> None:
        work = (self._make_offers(), self._tell_changes(), self._deliver())
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def say_goodbye(self) -> None:
        """Nobody is to look for blocks here any more."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        while not self._outgoing.empty():
            self._outgoing.get_nowait()  # a gap at most, which the restate closes
        for model, row in self._rows.items():
            for event in row.restate([], self._info(model)):
                await self._publish(KV_EVENTS.at(instance=event.instance), event)

    async def _make_offers(self) -> None:
        while True:
            self._outgoing.put_nowait((KV_TIER.at(), self._offer))
            await asyncio.sleep(OFFER_EVERY_S)

    async def _tell_changes(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            await asyncio.sleep(GATHER_S)
            self._changed.clear()
            await self._note()
            # What changes while the broker is away is told when it is back.
            if self._bus.connected:
                for model, row in self._rows.items():
                    self._send_events(row.take(self._info(model)))

    async def _note(self) -> None:
        while new := {model for model, _, _ in self._book.changes} - self._rows.keys():
            await self._begin(new.pop())
        # At one go, so that a restate finds all changes either noted or still in the book.
        changes, self._book.changes = self._book.changes, []
        for model, block_hash, came in changes:
            self._rows[model].note([block_hash] if came else [], [] if came else [block_hash])

    async def _begin(self, model: str) -> None:
        name = tier_row(self._offer.instance, model)
        log.info("second tier holds blocks of a model", model=model, row=name)
        self._rows[model] = KvEventLog(name, self._offer.born)
        self._subscriptions.append(
            await self._bus.subscribe(KV_RESTATE.at(instance=name), self._restates(model))
        )

    def _restates(self, model: str) -> Callable[[Restate], None]:
        def restate(_: Restate) -> None:
            # Changes not noted yet are in the list below already.
            self._book.changes = [change for change in self._book.changes if change[0] != model]
            self._send_events(self._rows[model].restate(self._book.complete(model), self._info(model)))

        return restate

    def _info(self, model: str) -> InstanceInfo:
        """A row that runs nothing: it has no slots."""
        return InstanceInfo(
            instance=tier_row(self._offer.instance, model),
            model=model,
            fingerprint="",
            role="mixed",
            state="ready",
            born=self._offer.born,
            block_tokens=0,
            blocks_total=self._book.complete_count(model),
            max_slots=0,
            max_len=0,
            vocab_size=0,
            max_step_tokens=0,
            version=self._version,
            detail=(("tier", self._offer.instance),),
        )

    def _send_events(self, events: list[KvEvents]) -> None:
        for event in events:
            self._outgoing.put_nowait((KV_EVENTS.at(instance=event.instance), event))

    async def _deliver(self) -> None:
        while True:
            await self._publish(*await self._outgoing.get())

    async def _publish(self, to: Address, message: Wire) -> None:
        """Nothing is kept for a broker that is away: sequence numbers tell what was lost."""
        with contextlib.suppress(BusDown):
            await self._bus.publish(to, message)
