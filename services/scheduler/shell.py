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
    Hint,
    Lead,
    LeaseSeen,
    LookUp,
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
from shared.wire import Ack, Cancel, Claim, Claimed, Inventory, Submit, Wire

TICK_S = 0.05
LEASE_POLL_S = 0.5
LOOKUP_S = 0.5
"""After this the shared index is not waited for any more; sequences are held back for much less."""
ANSWER_S = 0.5
"""How long a claim may take to be answered before it is sent again."""


class Shell:
    """Runs one core on a bus. `run` is its whole life; made on the loop it runs on."""

    def __init__(self, core: Core, bus: Bus, store: Store | None, model: str, log: Any) -> None:
        self.core = core
        self._bus = bus
        self._store = store
        self._model = model
        self._log = log
        self._urgent: deque[Effect] = deque()
        self._later: deque[Effect] = deque()
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[Any] = self._loop.create_future()
        """Gets the exception that ends this process."""
        self._turning = False
        self._subscribing: asyncio.Future[None] | None = None
        self._leading: list[Subscription] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._lease: tuple[int, str] | None = None
        self._lease_now = asyncio.Event()
        self._addresses: dict[tuple[str, str], Address] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then leadership is given up in Redis so that a standby need not wait.

        Raises what the core raised: its books cannot be trusted then. Whoever starts us again begins with
        empty ones, and clients submit what is open.
        """
        self._bus.on_state(lambda up: self._feed(Connected(up)))
        always = [
            await self._bus.subscribe(subjects.RESYNC.every(), self._feed),
            await self._bus.subscribe(subjects.BEACON.at(), self._feed),
        ]
        works = [self._tick()]
        if self._store is not None:
            works.append(self._keep_lease(self._store))
        tasks = [self._broken, *(asyncio.ensure_future(work) for work in works)]
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
            self._feed(Stop())
            # A copy: while we wait for Redis, a turn still due takes effects out.
            for effect in tuple(self._urgent):
                if isinstance(effect, DropLease):
                    await self._drop_lease(effect)

    # In

    def _feed(self, event: Any) -> None:
        self._handle(event)
        if not self._turning:
            self._turning = True
            # Behind whatever else this loop iteration brings.
            self._loop.call_soon(self._turn)

    def _handle(self, event: Any) -> None:
        try:
            effects = self.core.handle(event, time.monotonic())
        except Exception as error:
            if isinstance(event, Submit | Cancel | Ack):
                # Refused as a whole before anything was planned; the bus counts and logs it.
                raise
            self._break(error)
            return
        if effects:
            self._sort(effects)

    def _break(self, error: Exception) -> None:
        self._log.error("core failed", exc_info=error)
        if not self._broken.done():
            self._broken.set_exception(error)

    def _sort(self, effects: list[Effect]) -> None:
        for effect in effects:
            (self._later if type(effect) is SendTokens else self._urgent).append(effect)

    async def _tick(self) -> None:
        checked = 0
        while True:
            self._feed(Tick())
            await asyncio.sleep(TICK_S)
            steps = self.core.counters.steps
            if steps != checked and self.core.idle:
                # Once after each burst of work, when it disturbs nobody.
                checked = steps
                self._check_books()

    def _check_books(self) -> None:
        try:
            self.core.check()
        except AssertionError as error:
            self._break(error)

    # Out

    def _turn(self) -> None:
        """One turn for all that arrived in a loop iteration; its effects in order, token frames last."""
        self._turning = False
        self._handle(Turn())
        self._flush()

    async def _look_up(self, effect: LookUp) -> None:
        """Always ends in a hint, or the sequences would be held back until something else happens. An answer
        that comes later is taken as well: asking is not broken off, which would cost the connection."""
        asking = self._spawn(self._ask_index(effect))
        await asyncio.wait({asking}, timeout=effect.hold_s)
        if not asking.done():
            self._feed(Hint(effect.client, effect.handles, None))

    async def _ask_index(self, effect: LookUp) -> None:
        found: dict[str, int] | None = None
        if self._store is not None:
            with contextlib.suppress(StoreDown, TimeoutError):
                async with asyncio.timeout(LOOKUP_S):
                    found = await self._store.longest_prefix(self._model, effect.hashes)
        self._feed(Hint(effect.client, effect.handles, found))

    def _flush(self) -> None:
        urgent, later = self._urgent, self._later
        # While subscriptions change, effects wait: clients must not hear of a leader that is still deaf.
        while (urgent or later) and self._subscribing is None:
            effect = urgent.popleft() if urgent else later.popleft()
            if type(effect) is SendStep:
                self._send(self._at("step", effect.step.instance), effect.step)
            elif type(effect) is SendTokens:
                self._send(self._at("tokens", effect.client), effect.tokens)
            else:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendBeacon):
            self._send(subjects.BEACON.at(), effect.beacon)
        elif isinstance(effect, Note):
            self._log.info(effect.event, **effect.fields)
        elif isinstance(effect, AskClaim):
            self._spawn(self._ask(effect.instance, "claim", effect.claim))
        elif isinstance(effect, AskInventory):
            self._spawn(self._ask(effect.instance, "inventory", effect.inventory))
        elif isinstance(effect, LookUp):
            self._spawn(self._look_up(effect))
        elif isinstance(effect, WriteLease):
            self._lease = (effect.epoch, effect.owner)
            self._lease_now.set()
        elif isinstance(effect, DropLease):
            self._spawn(self._drop_lease(effect))
        elif isinstance(effect, Lead | Follow):
            self._subscribing = self._spawn(self._resubscribe(isinstance(effect, Lead)))

    def _at(self, kind: str, token: str) -> Address:
        address = self._addresses.get((kind, token))
        if address is None:
            if len(self._addresses) > 10_000:
                self._addresses.clear()
            subject = subjects.STEP if kind == "step" else subjects.TOKENS
            name = "instance" if kind == "step" else "client"
            address = self._addresses[kind, token] = subject.at(**{name: token})
        return address

    def _send(self, to: Address, message: Wire) -> None:
        # A frame that could not be sent is like one lost on the way: the protocol sends it again.
        with contextlib.suppress(BusDown):
            try:
                self._bus.publish_soon(to, message)
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task: asyncio.Future[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("task failed", exc_info=error)

    # Leadership

    async def _resubscribe(self, lead: bool) -> None:
        """Listen to clients and results as a leader, or stop that; then let waiting effects go."""
        try:
            leading, self._leading = self._leading, []
            for subscription in leading:
                await subscription.unsubscribe()
            if not lead:
                self._lease = None
                return
            model = subjects.subject_token(self._model)
            for address, handler in (
                (subjects.DONE.every(), self._feed),
                (subjects.ACK.every(), self._feed),
                (subjects.SUBMIT.at(model=model), self._feed),
                (subjects.CANCEL.at(model=model), self._feed),
            ):
                self._leading.append(await self._bus.subscribe(address, handler))
        except BusDown:
            # Only a connection that is closed for good refuses: the process is ending.
            self._log.warning("could not subscribe", lead=lead)
        finally:
            self._subscribing = None
            self._flush()

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
