"""The worker on the bus: rank 0 of an instance, from its first beat to its goodbye (docs/protocol.md §3)."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from services.worker.compute import BrokenSession, Compute, FetchEnd, Outcome
from services.worker.gate import ClaimVerdict
from services.worker.holdings import Holdings
from services.worker.metrics import WorkerMetrics
from services.worker.runner import Runner, answer_of
from services.worker.session import Reaction, Session
from services.worker.tier.desk import TierDesk
from services.worker.tier.homes import Homes
from shared import subjects
from shared.bus.port import Bus, BusDown, PayloadTooLarge, Subscription
from shared.kv_events import GATHER_S, HEARTBEAT_S, KvEventLog
from shared.subjects import Address
from shared.wire import (
    Beacon,
    Claim,
    Claimed,
    Done,
    Drain,
    InstanceInfo,
    Inventory,
    KvEvents,
    Ready,
    Restate,
    Step,
    Stopped,
    TierOffer,
    Wire,
)

BEAT_S = 0.5

FINISH_S = 5.0
"""How long the step at hand may take to end when we are told to stop."""

HUNG_AFTER_S = 20.0
"""A step is planned to take at most 0.5 s; one this long is not busy any more, it hangs."""


@dataclass(frozen=True)
class Identity:
    """What the process knows of itself before the executor is built."""

    instance: str
    model: str
    born: int
    """Microseconds since 1970 at process start."""
    max_slots: int
    max_step_tokens: int
    version: str = ""


class EngineFailed(RuntimeError):
    """The executor raised; the process must end, its memory is in an unknown state."""


class WorkerService:
    """Wires session, runner and event log to the bus. `run` is its whole life."""

    def __init__(self, bus: Bus, runner: Runner, identity: Identity, registry: CollectorRegistry) -> None:
        self._bus = bus
        self._runner = runner
        self._identity = identity
        self._metrics = WorkerMetrics(registry)
        self._log = structlog.get_logger()
        self._current: Session | None = None
        self._homes = Homes(identity.model)
        self._tier: TierDesk | None = None
        self._group: Callable[[], dict[str, Any]] = dict
        self._holdings = Holdings()
        self._kv_changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._over = asyncio.Event()
        self._running = 0
        self._done_to = subjects.DONE.at(instance=identity.instance)
        self._resync_to = subjects.RESYNC.at(instance=identity.instance)
        self._kv_to = subjects.KV_EVENTS.at(instance=identity.instance)
        self._events = KvEventLog(identity.instance, identity.born)
        self.ready = asyncio.Event()
        """Set once the executor is built and every subject is subscribed."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`: then the step at hand is finished and a goodbye said.

        Raises `EngineFailed` after the goodbye when the executor failed, and what building it raised.
        """
        offers = await self._bus.subscribe(subjects.KV_TIER.at(), self._on_offer)
        started = asyncio.ensure_future(self._runner.start(self))
        told = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({started, told}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            # Nobody has heard of us yet. The thread that loads the model ends with the process.
            started.cancel()
            return
        compute = started.result()
        self._current = Session(self._info(compute))
        self._group = compute.report
        self._holdings = Holdings(compute.memory())
        for text in self._holdings.warnings():
            self._log.warning("memory was predicted wrongly", what=text)
        self._metrics.memory(self._holdings.report())
        self._tier = tier = TierDesk(self._runner, compute, self._homes, self)
        # The first beat invites a claim: by then we must listen.
        subscriptions = [offers, *await self._subscribe()]
        await tier.settle()
        tasks = [asyncio.ensure_future(work) for work in (self._beat(), self._tell_kvstore(), tier.watch())]
        self._log.info("instance ready to be claimed", **self.stats())
        self.ready.set()
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait({told, over, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        # Refuse, finish, say goodbye, close.
        for subscription in subscriptions:
            await subscription.unsubscribe()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._runner.close(), FINISH_S)
        for task in (*tasks, told, over):
            task.cancel()
        reason = f"engine failed: {self._failure}" if self._failure else "stopped"
        self._send(self._resync_to, self._session.goodbye(reason))
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    @property
    def _session(self) -> Session:
        if self._current is None:
            raise RuntimeError("the executor is not built yet")
        return self._current

    def stats(self) -> dict[str, Any]:
        """Data of service discovery."""
        if self._current is None:
            return {"state": "starting", "instance": self._identity.instance}
        info = self._session.info
        fields = {name: getattr(info, name) for name in info.__struct_fields__ if name != "detail"}
        return fields | {
            "detail": dict(info.detail),
            "incarnation": self._session.gate.incarnation,
            "seen_seq": self._session.gate.seen_seq,
            "done_seq": self._session.done_seq,
            "slots": self._running,
            "group": self._group(),
            "memory": self._holdings.report(),
            "second_tier": {} if self._tier is None else self._tier.report(),
        }

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Alive: idle, or a step that has not been running for too long."""
        busy_s = self._runner.busy_s()
        state = self._current.info.state if self._current else "starting"
        detail = {"state": state, "step_running_s": round(busy_s, 3)}
        return self._failure is None and busy_s < HUNG_AFTER_S, detail

    # What the runner says, in the order of the frames.

    def computed(self, outcome: Outcome) -> None:
        if outcome.stored or outcome.removed:
            self._events.note(outcome.stored, outcome.removed)
            self._kv_changed.set()
        self._metrics.step(outcome)
        if self._session.on_result(outcome.done):
            self._running = outcome.running
            self._send(self._done_to, outcome.done)

    def broken(self, session: BrokenSession) -> None:
        if self._session.on_broken(session.incarnation, str(session.fault), self._fresh()):
            self._log.error("session broken", incarnation=session.incarnation, fault=str(session.fault))
            self._metrics.session_broke()
            self._forget_fetches()
            self._runner.fence(self._session.gate.incarnation)
            self._say(self._session.beat())

    # What the second tier's desk says.

    def fetch_ended(self, end: FetchEnd) -> None:
        if end.stored or end.removed:
            self._events.note(end.stored, end.removed)
            self._kv_changed.set()
        if self._session.on_fetched(end.session, end.fetched):
            self._say(self._session.beat())

    def tier_changed(self, row: str, fixed_s: float, block_s: float) -> None:
        moved = row != self._session.info.tier
        self._session.use_tier(row, fixed_s, block_s)
        if moved:
            self._say(self._session.beat())

    def _forget_fetches(self) -> None:
        if self._tier is not None:
            self._tier.forget()

    def failed(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._log.error("engine failed", exc_info=error)
        self._failure = error
        self._over.set()
        if self._current is not None:  # a group may be lost before anybody has heard of the instance
            self._session.fail(f"{type(error).__name__}: {error}")
            self._say(self._session.beat())

    # What the bus brings.

    async def _subscribe(self) -> list[Subscription]:
        instance = self._identity.instance
        bus = self._bus
        responders: dict[str, Callable[[Any], Any]] = {
            "claim": self._on_claim,
            "inventory": self._on_inventory,
            "drain": self._on_drain,
            "ready": self._on_ready,
        }
        return [
            await bus.subscribe(subjects.STEP.at(instance=instance), self._on_step),
            await bus.subscribe(subjects.BEACON.at(), self._on_beacon),
            await bus.subscribe(subjects.KV_RESTATE.at(instance=instance), self._on_restate),
            *[
                await bus.respond(subjects.INSTANCE.at(instance=instance, verb=verb), responder)
                for verb, responder in responders.items()
            ],
        ]

    def _on_step(self, frame: Step) -> None:
        verdict, reaction = self._session.on_step(frame, time.monotonic())
        self._metrics.frame(verdict)
        if reaction.run:
            self._runner.submit(frame)
            if frame.fetch and self._tier is not None:
                self._tier.begin(frame)
        else:
            self._react(reaction)

    def _on_beacon(self, beacon: Beacon) -> None:
        self._react(self._session.on_beacon(beacon, time.monotonic()))

    def _on_offer(self, offer: TierOffer) -> None:
        if self._tier is None:  # the model is loading
            self._homes.hear(offer, time.monotonic())
        else:
            self._tier.on_offer(offer)

    def _on_restate(self, request: Restate) -> None:
        self._log.info("restating", reason=request.reason)
        self._runner.ask(Compute.all_hashes, self._restate)

    async def _on_claim(self, claim: Claim) -> Claimed | None:
        if not isinstance(claim, Claim):
            return None
        verdict, incarnation = self._session.on_claim(claim, self._fresh())
        if verdict is ClaimVerdict.REFUSED:
            return self._claimed(False, incarnation, claim.claim_id)
        if verdict is ClaimVerdict.ACCEPTED:
            self._log.info("claimed", epoch=claim.epoch, owner=claim.owner, incarnation=incarnation)
            self._runner.fence(incarnation)
            self._metrics.session_began()
            self._forget_fetches()
            self._running = 0
            blocks, after = await answer_of(self._runner, Compute.begin)
        else:
            blocks, after = await answer_of(self._runner, lambda compute: compute.page(0))
        return self._claimed(True, incarnation, claim.claim_id, blocks, after)

    async def _on_inventory(self, request: Inventory) -> Claimed | None:
        if not isinstance(request, Inventory):
            return None
        current = self._session.gate.incarnation
        if request.incarnation != current:
            return self._claimed(False, current)
        blocks, after = await answer_of(self._runner, lambda compute: compute.page(request.offset))
        return self._claimed(True, current, "", blocks, after)

    async def _on_drain(self, request: Drain) -> Wire | None:
        if not isinstance(request, Drain):
            return None
        self._session.drain(request.undo)
        self._log.info("drain", undo=request.undo, slots=self._running)
        beat = self._session.beat()
        self._say(beat)
        return beat

    async def _on_ready(self, request: Ready) -> Wire | None:
        return self._session.beat() if isinstance(request, Ready) else None

    # What goes out.

    def _react(self, reaction: Reaction) -> None:
        if reaction.done is not None:
            self._send(self._done_to, reaction.done)
        for message in reaction.say:
            self._say(message)

    def _say(self, message: Wire) -> None:
        self._send(self._resync_to, message)

    def _restate(self, hashes: list[bytes]) -> None:
        self._tell(self._events.restate(hashes, self._session.info))

    async def _beat(self) -> None:
        while True:
            self._say(self._session.beat())
            self._metrics.group(self._group())
            self._metrics.memory_now(self._holdings.now())
            self._metrics.tier(self._tier.report() if self._tier else {})
            await asyncio.sleep(BEAT_S)

    async def _tell_kvstore(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._kv_changed.wait(), HEARTBEAT_S)
            await asyncio.sleep(GATHER_S)
            self._kv_changed.clear()
            # What happens while the broker is away is told when it is back.
            if self._bus.connected:
                self._tell(self._events.take(self._session.info))

    def _tell(self, events: list[KvEvents]) -> None:
        for event in events:
            self._send(self._kv_to, event)

    def _send(self, to: Address, message: Wire) -> None:
        """What is said leaves in the order in which it was decided.

        Nothing is kept for a broker that is away: sequence numbers tell what was lost.
        """
        try:
            self._bus.publish_soon(to, message)
        except BusDown:
            pass
        except PayloadTooLarge as error:
            self._log.error("frame too large", subject=to.subject, size=error.size, limit=error.limit)
            if isinstance(message, Done):
                self._send(to, _without_prompt_logprobs(message))

    def _claimed(
        self, ok: bool, incarnation: int, claim_id: str = "", blocks: Any = (), next_offset: int = 0
    ) -> Claimed:
        highest = self._session.gate.highest
        return Claimed(
            ok=ok,
            epoch=highest.epoch,
            owner=highest.owner,
            incarnation=incarnation,
            info=self._session.info,
            claim_id=claim_id,
            blocks=list(blocks),
            next_offset=next_offset,
        )

    def _fresh(self) -> int:
        """An incarnation above all former ones, of former lives too: microseconds since 1970."""
        return max(time.time_ns() // 1000, self._session.gate.incarnation + 1)

    def _info(self, compute: Compute) -> InstanceInfo:
        executor, identity = compute.executor.info, self._identity
        relay = compute.relay
        ranks = () if relay is None else tuple(relay.detail().items())
        return InstanceInfo(
            instance=identity.instance,
            model=identity.model,
            fingerprint=executor.fingerprint,
            role="mixed",
            state="ready",
            born=identity.born,
            block_tokens=executor.block_tokens,
            blocks_total=executor.blocks_total,
            max_slots=identity.max_slots,
            max_len=executor.max_len,
            vocab_size=executor.vocab_size,
            max_step_tokens=identity.max_step_tokens,
            prefill_tok_s=executor.prefill_tok_s,
            decode_step_s=executor.decode_step_s,
            version=identity.version,
            detail=executor.detail + ranks,
            tp=1 if relay is None else relay.size,
        )


def _without_prompt_logprobs(done: Done) -> Done:
    """The result with the sequences ended whose prompt log-probabilities do not fit a frame."""
    stopped = [
        Stopped(
            row.slot, "error", f"prompt_logprobs of {len(row.chosen)} positions exceed the broker's limit"
        )
        for row in done.prompt_logprobs
    ]
    return msgspec.structs.replace(done, prompt_logprobs=[], stopped=[*done.stopped, *stopped])
