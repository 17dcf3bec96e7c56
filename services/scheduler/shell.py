"""The scheduler's I/O: messages in, effects out. All decisions are the core's.

Handlers feed the core at once; whatever they and timers of one loop iteration brought is then answered by a
single turn: step frames first, token frames after them, so that no instance waits for clients' bytes.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from services.scheduler.core import Core
from services.scheduler.events import (
    AskClaim,
    AskInventory,
    ClaimAnswer,
    Connected,
    DropLease,
    Effect,
    Follow,
    Lead,
    LeaseSeen,
    Note,
    SendBeacon,
    SendStep,
    SendTokens,
    Stop,
    Tick,
    Turn,
    WriteLease,
)
from shared import subjects
from shared.bus.port import Bus, BusDown, NoAnswer, PayloadTooLarge, Subscription
from shared.store.port import Store, StoreDown
from shared.subjects import Address
from shared.wire import Claim, Claimed, Inventory, Wire

TICK_S = 0.05
LEASE_POLL_S = 0.5
ANSWER_S = 0.5
"""How long a claim may take to be answered before it is sent again."""


class Shell:
    """Runs one core on a bus. `run` is its whole life."""

    def __init__(self, core: Core, bus: Bus, store: Store | None, model: str, log: Any) -> None:
        self.core = core
        self._bus = bus
        self._store = store
        self._model = model
        self._log = log
        self._urgent: deque[Effect] = deque()
        self._later: deque[Effect] = deque()
        self._wake = asyncio.Event()
        self._leading: list[Subscription] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._lease: tuple[int, str] | None = None
        self._lease_now = asyncio.Event()
        self._addresses: dict[tuple[str, str], Address] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then leadership is given up in Redis so that a standby need not wait."""
        self._bus.on_state(lambda up: self._feed(Connected(up)))
        always = [
            await self._bus.subscribe(subjects.RESYNC.every(), self._feed),
            await self._bus.subscribe(subjects.BEACON.at(), self._feed),
        ]
        works = [self._pump(), self._tick()]
        if self._store is not None:
            works.append(self._keep_lease(self._store))
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for subscription in (*always, *self._leading):
                await subscription.unsubscribe()
            stop.cancel()
            for task in (*tasks, *self._tasks):
                task.cancel()
            for effect in self.core.handle(Stop(), time.monotonic()):
                if isinstance(effect, DropLease):
                    await self._drop_lease(effect)

    # In

    def _feed(self, event: Any) -> None:
        effects = self.core.handle(event, time.monotonic())
        if effects:
            self._sort(effects)
        self._wake.set()

    def _sort(self, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is SendTokens:
                self._later.append(effect)
            else:
                self._urgent.append(effect)

    async def _tick(self) -> None:
        while True:
            self._feed(Tick())
            await asyncio.sleep(TICK_S)

    # Out

    async def _pump(self) -> None:
        """One turn for all that arrived in a loop iteration; its effects in order, token frames last."""
        core, urgent, later = self.core, self._urgent, self._later
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._sort(core.handle(Turn(), time.monotonic()))
            while urgent or later:
                effect = urgent.popleft() if urgent else later.popleft()
                if type(effect) is SendStep:
                    await self._send(self._at("step", effect.step.instance), effect.step)
                elif type(effect) is SendTokens:
                    await self._send(self._at("tokens", effect.client), effect.tokens)
                else:
                    await self._carry_out(effect)

    async def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendBeacon):
            await self._send(subjects.BEACON.at(), effect.beacon)
        elif isinstance(effect, Note):
            self._log.info(effect.event, **effect.fields)
        elif isinstance(effect, AskClaim):
            self._spawn(self._ask(effect.instance, "claim", effect.claim))
        elif isinstance(effect, AskInventory):
            self._spawn(self._ask(effect.instance, "inventory", effect.inventory))
        elif isinstance(effect, WriteLease):
            self._lease = (effect.epoch, effect.owner)
            self._lease_now.set()
        elif isinstance(effect, DropLease):
            self._spawn(self._drop_lease(effect))
        elif isinstance(effect, Lead):
            await self._lead()
        elif isinstance(effect, Follow):
            await self._follow()

    def _at(self, kind: str, token: str) -> Address:
        address = self._addresses.get((kind, token))
        if address is None:
            if len(self._addresses) > 10_000:
                self._addresses.clear()
            subject = subjects.STEP if kind == "step" else subjects.TOKENS
            name = "instance" if kind == "step" else "client"
            address = self._addresses[kind, token] = subject.at(**{name: token})
        return address

    async def _send(self, to: Address, message: Wire) -> None:
        # A frame that could not be sent is like one lost on the way: the protocol sends it again.
        with contextlib.suppress(BusDown):
            try:
                await self._bus.publish(to, message)
            except PayloadTooLarge as error:
                self._log.error("frame too large", subject=to.subject, size=error.size, limit=error.limit)

    async def _ask(self, instance: str, verb: str, message: Claim | Inventory) -> None:
        address = subjects.INSTANCE.at(instance=instance, verb=verb)
        try:
            claimed = await self._bus.request(
                address, message, reply=subjects.INSTANCE.reply_codec, timeout_s=ANSWER_S
            )
        except (NoAnswer, BusDown):
            return
        if isinstance(claimed, Claimed):
            self._feed(ClaimAnswer(instance, claimed))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Future[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Leadership

    async def _lead(self) -> None:
        model = subjects.subject_token(self._model)
        for address in (
            subjects.DONE.every(),
            subjects.ACK.every(),
            subjects.SUBMIT.at(model=model),
            subjects.CANCEL.at(model=model),
        ):
            self._leading.append(await self._bus.subscribe(address, self._feed))

    async def _follow(self) -> None:
        self._lease = None
        leading, self._leading = self._leading, []
        for subscription in leading:
            await subscription.unsubscribe()

    async def _keep_lease(self, store: Store) -> None:
        """Followers read the lease, the leader renews it; a store that is down changes nothing but that."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lease_now.wait(), LEASE_POLL_S)
            self._lease_now.clear()
            try:
                await self._one_lease_round(store)
            except StoreDown:
                self._feed(LeaseSeen(known=False))

    async def _one_lease_round(self, store: Store) -> None:
        ttl_s = self.core.rules.leadership.lease_ttl_s
        if self._lease is not None and await store.write_lease(self._model, *self._lease, ttl_s):
            return
        state = await store.read_lease(self._model)
        if state.holder is None:
            self._feed(LeaseSeen(known=True, epoch=state.highest_epoch))
        else:
            epoch, owner = state.holder
            self._feed(LeaseSeen(known=True, epoch=max(epoch, state.highest_epoch), owner=owner, ttl_s=ttl_s))

    async def _drop_lease(self, effect: DropLease) -> None:
        if self._store is not None:
            with contextlib.suppress(StoreDown):
                await self._store.release_lease(self._model, effect.epoch, effect.owner)
