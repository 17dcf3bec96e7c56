"""The shell around the core: events from the bus, effects to store and instances, the duty, the sweep."""

import asyncio
import time
from collections import deque
from typing import Any

import structlog

from services.kvstore.core import (
    AskRestate,
    BeginRow,
    BusChanged,
    ChangeRow,
    DutyChanged,
    Effect,
    Event,
    Forget,
    KvCore,
    PutRecord,
    RowLost,
    RowsFound,
    Tick,
)
from shared.bus.port import Bus, BusDown
from shared.store.port import IndexFull, Store, StoreDown, number_of
from shared.store.records import encode_record
from shared.subjects import KV_EVENTS, KV_RESTATE
from shared.wire import Restate

log = structlog.get_logger()

TICK_S = 0.1
DUTY = "kvstore"
DUTY_TTL_S = 3.0
DUTY_EVERY_S = 1.0
MAX_WAITING = 20_000
"""Effects that wait for a slow store; beyond it a restate later is cheaper than all of them."""


class KvstoreService:
    """One kvstore process on a bus and a store. `run` works until `stopping` is set."""

    def __init__(self, bus: Bus, store: Store | None, owner: str, *, sweep_every_s: float = 60.0) -> None:
        self.core = KvCore()
        self.swept_blocks: dict[str, int] = {}
        """Distinct blocks in the index of each model, by its last whole sweep."""
        self.writing = False
        self._bus = bus
        self._store = store
        self._owner = owner
        self._sweep_every_s = sweep_every_s
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        # (model, instance) → (born, what the store names its row by)
        self._waiting: deque[Effect] = deque()
        self._wake = asyncio.Event()
        self._sweep: tuple[str, int, int] | None = None
        # model, cursor, blocks kept so far
        self._sweep_at: dict[str, float] = {}
        self._duty_at = float("-inf")
        self._away = False

    async def run(self, stopping: asyncio.Event) -> None:
        # Every process hears every event, so that each can take over; only the holder of the duty writes.
        events = await self._bus.subscribe(KV_EVENTS.every(), self._on)
        self._bus.on_state(lambda connected: self._on(BusChanged(connected)))
        writer = asyncio.ensure_future(self._write())
        try:
            while not stopping.is_set():
                await self._duty()
                self._on(Tick())
                await self._sweep_on()
                try:
                    await asyncio.wait_for(stopping.wait(), TICK_S)
                except TimeoutError:
                    continue
        finally:
            await events.unsubscribe()
            writer.cancel()
            await asyncio.wait({writer})
            await self._leave()

    def stats(self) -> dict[str, Any]:
        """Data of `$SRV.STATS`."""
        counts = self.core.counts
        return {
            "writing": self.writing,
            "instances": self.core.heard_of,
            "index_blocks": sum(self.core.blocks.values()),
            "events": counts.events,
            "gaps": counts.gaps,
            "restates_asked": counts.asked,
            "restates": counts.restates,
            "waiting": len(self._waiting),
        }

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Always well: without the store there is only no reuse across instances."""
        return True, {"state": "writing" if self.writing else "standby", "instances": self.core.heard_of}

    def _on(self, event: Event) -> None:
        effects = self.core.handle(event, time.monotonic())
        if effects:
            self._waiting.extend(effects)
            self._wake.set()
            if len(self._waiting) > MAX_WAITING:
                self._lost_store("the store is too slow")

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                effect = self._waiting.popleft()
                try:
                    await self._execute(effect)
                except StoreDown as error:
                    self._lost_store(str(error))
                except BusDown:
                    # Asked again by a later tick.
                    continue

    async def _execute(self, effect: Effect) -> None:
        if isinstance(effect, AskRestate):
            log.info("asking for a restate", asked=effect.instance, reason=effect.reason)
            restate = Restate(instance=effect.instance, reason=effect.reason)
            await self._bus.publish(KV_RESTATE.at(instance=effect.instance), restate)
            return
        assert self._store is not None
        match effect:
            case BeginRow(model, instance, born):
                try:
                    row = await self._store.index_begin(model, instance, born)
                except IndexFull as error:
                    log.warning("prefix index is full", model=model, reason=str(error))
                    self._sweep_at.pop(model, None)
                    return
                self._rows[model, instance] = (born, row)
            case ChangeRow():
                await self._change(effect)
            case Forget(model, instance):
                self._rows.pop((model, instance), None)
                await self._store.index_retire(model, instance)
                await self._store.drop_instance(model, instance)
            case PutRecord(model, instance, record, ttl_s):
                await self._store.put_instance(model, instance, encode_record(record), ttl_s)

    async def _change(self, change: ChangeRow) -> None:
        assert self._store is not None
        born, row = self._rows.get((change.model, change.instance), (None, -1))
        kept = born == change.born and await self._store.index_add(change.model, row, change.stored)
        if kept and change.removed:
            kept = await self._store.index_remove(change.model, row, change.removed)
        if not kept:
            self._on(RowLost(change.instance, change.born))

    async def _duty(self) -> None:
        """Keep, take or miss the duty to write; asked again every second, or at once after a failure."""
        now = time.monotonic()
        if self._store is None or now - self._duty_at < DUTY_EVERY_S:
            return
        self._duty_at = now
        try:
            ours = await self._store.hold(DUTY, self._owner, DUTY_TTL_S)
        except StoreDown as error:
            if not self._away and not self.writing:
                log.warning("the store is away", reason=str(error))
            self._away = True
            self._lost_store(str(error))
            return
        self._away = False
        if ours != self.writing:
            log.info("writing the prefix index" if ours else "another kvstore writes the prefix index")
            self.writing = ours
            self._rows.clear()
            self._sweep_at.clear()
            self._on(DutyChanged(ours))

    def _lost_store(self, reason: str) -> None:
        """What waits is void: everything is restated when the store is back."""
        self._waiting.clear()
        self._sweep = None
        if self.writing:
            log.warning("store lost", reason=reason)
            self.writing = False
            self._rows.clear()
            self._on(DutyChanged(False, "store was away"))

    async def _sweep_on(self) -> None:
        """One slice of the sweep under way, or the first of the next one that is due."""
        if not self.writing or self._store is None:
            return
        now = time.monotonic()
        if self._sweep is None:
            due = [
                m
                for m in self.core.models
                if now - self._sweep_at.get(m, float("-inf")) > self._sweep_every_s
            ]
            if not due:
                return
            self._sweep = (min(due), 0, 0)
            self._sweep_at[min(due)] = now
        model, cursor, kept = self._sweep
        try:
            if cursor == 0:
                self._compare(model, await self._store.index_rows(model))
            part = await self._store.index_sweep(model, cursor)
        except StoreDown as error:
            self._lost_store(str(error))
            return
        if self._sweep is None:
            return
        self._sweep = (model, part.cursor, kept + part.kept) if part.cursor else None
        if self._sweep is None:
            self.swept_blocks[model] = kept + part.kept

    def _compare(self, model: str, found: dict[str, int]) -> None:
        """The rows that lookups see, against ours: whoever changed or lost them, they are begun anew."""
        for (row_model, instance), (born, row) in list(self._rows.items()):
            if row_model == model and found.get(instance) != number_of(row):
                self._on(RowLost(instance, born))
        self._on(RowsFound(model, frozenset(found)))

    async def _leave(self) -> None:
        """Give the duty to whoever waits for it."""
        if self._store is not None and self.writing:
            try:
                await self._store.let_go(DUTY, self._owner)
            except StoreDown:
                log.info("the store is away; the duty lapses by itself", ttl_s=DUTY_TTL_S)
