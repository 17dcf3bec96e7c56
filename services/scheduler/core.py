"""The scheduler's state machine: `handle(event, now) -> effects`. No awaits, no clock, no random source.

This file dispatches and ties the parts together; each part owns its own file. Frames to instances and
clients are made at `Turn`, once per loop iteration of the shell, so that all that arrived together is
answered together.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from services.scheduler.admission import Reservation
from services.scheduler.budget import BudgetRules
from services.scheduler.counters import Counters
from services.scheduler.desk import Desk, DeskRules, Supply
from services.scheduler.events import (
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
from services.scheduler.fetching import Fetching, FetchRules
from services.scheduler.fleet import Fleet, FleetRules
from services.scheduler.instances import State
from services.scheduler.leadership import Leadership, LeadershipTimes, Rule, leads_model
from services.scheduler.placement import FirstTokenSoonest, Placement
from services.scheduler.planner import Planner
from services.scheduler.policy import BatchPolicy
from services.scheduler.preempt import LeastHarm, Preemption
from services.scheduler.seat import prefix_hashes
from services.scheduler.sequences import Sequence
from shared.wire import Ack, Beacon, Beat, Cancel, Done, Goodbye, Refused, Resync, Submit


@dataclass(frozen=True)
class Rules:
    """Every number the core goes by."""

    model: str
    leadership: LeadershipTimes = field(default_factory=LeadershipTimes)
    budget: BudgetRules = field(default_factory=BudgetRules)
    desk: DeskRules = field(default_factory=DeskRules)
    fleet: FleetRules = field(default_factory=FleetRules)
    fetch: FetchRules = field(default_factory=FetchRules)
    max_running: int = 0


class Core:
    """One scheduler process. Feed it events in order of arrival; carry out its effects in order."""

    def __init__(
        self,
        owner: str,
        rules: Rules,
        policy: BatchPolicy,
        reservation: Reservation,
        *,
        rng: random.Random,
        now: float,
        placement: Placement | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.owner = owner
        self.rules = rules
        self.counters = Counters()
        self.leadership = Leadership(owner, rules.leadership, now)
        self.desk = Desk(rules.desk, reservation, self.counters)
        self.planner = Planner(policy, reservation, rules.budget, self.counters, self.desk.preempted)
        self.planner.max_running = rules.max_running
        self.planner.rng = rng
        self.planner.placement = placement or FirstTokenSoonest()
        self.planner.fetching = Fetching(rules.fetch)
        self.planner.room.policy = preemption or LeastHarm()
        self.planner.room.aging_s = rules.desk.aging_s
        self.planner.room.fetch = rules.fetch
        self.fleet = Fleet(rules.fleet, self.counters, self.desk, rng)
        self.connected = True
        self._beacon_at = now
        self._manned_at = now
        """When an instance was last there."""
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Done: self._done,
            Submit: self._submit,
            Ack: self._ack,
            Cancel: self._cancel,
            Tick: self._tick,
            Turn: self._turn,
            Beat: self._beat,
            Beacon: self._beacon,
            ClaimAnswer: self._claim_answer,
            Resync: self._resync,
            Refused: self._refused,
            Goodbye: self._goodbye,
            LeaseSeen: self._lease_seen,
            Connected: self._connected,
            Hint: self._hint,
            Stop: self._stop,
        }

    @property
    def leads(self) -> bool:
        """Whether this process leads."""
        return self.leadership.rule is Rule.LEADER

    @property
    def idle(self) -> bool:
        """Nothing runs and nobody waits."""
        return not len(self.desk.queue) and not any(i.running or i.in_flight for i in self.fleet.active)

    def handle(self, event: Any, now: float) -> list[Effect]:
        """Take one event in. `now` is monotonic, in seconds."""
        leadership = self.leadership
        if leadership.woke(now):
            self._wake(now)
        self._handlers[type(event)](event, now)
        effects = self._effects
        if effects:
            self._effects = []
            if now < leadership.listening_until:
                # What is dropped here is resent by the protocol, if we still lead by then.
                effects = [effect for effect in effects if type(effect) not in (SendStep, SendTokens)]
        return effects

    # Clients

    def _submit(self, event: Submit, now: float) -> None:
        if self.leads:
            fleet = self.fleet
            absent_s = 0.0 if fleet.is_manned else now - self._manned_at
            self.desk.submit(event, Supply(fleet.infos(), self._vacant(), absent_s), now)

    def _vacant(self) -> int:
        most = self.rules.max_running
        return sum(
            max(0, min(most or len(i.table), len(i.table)) - len(i.running))
            for i in self.fleet.active
            if i.state is State.READY
        )

    def _cancel(self, event: Cancel, now: float) -> None:
        if self.leads:
            self.desk.cancel(event, now)

    def _ack(self, event: Ack, now: float) -> None:
        if not self.leads:
            return
        # Clients may be the only ones left that remember a leadership above ours. Clients of other models
        # speak of other leaders.
        ours = event.client in self.desk.clients or leads_model(event.owner, self.rules.model)
        if ours and self._outranked(event.epoch, event.owner, now):
            return
        self._effects += self.desk.ack(event, now)

    def _hint(self, event: Hint, now: float) -> None:
        if self.leads:
            self.desk.hint(event)

    # Instances

    def _done(self, event: Done, now: float) -> None:
        if self.leads:
            self._effects += self.fleet.done(event, now)

    def _beat(self, event: Beat, now: float) -> None:
        if event.info.model != self.rules.model:
            return
        if self._outranked(event.epoch, event.owner, now):
            return
        self._effects += self.fleet.beat(event, self.leadership.rule is not Rule.FOLLOWER, now)

    def _claim_answer(self, event: ClaimAnswer, now: float) -> None:
        claimed = event.claimed
        if self._outranked(claimed.epoch, claimed.owner, now) or self.leadership.rule is Rule.FOLLOWER:
            return
        self._effects += self.fleet.claimed(event.instance, claimed, now)
        if self.leadership.rule is Rule.CLAIMING and not self.fleet.unanswered():
            self._lead(now)

    def _resync(self, event: Resync, now: float) -> None:
        if event.instance not in self.fleet.instances:
            return
        if not self._outranked(event.epoch, event.owner, now) and self.leads:
            self._effects += self.fleet.resync(event, now)

    def _refused(self, event: Refused, now: float) -> None:
        if event.instance not in self.fleet.instances:
            return
        if not self._outranked(event.epoch, event.owner, now) and self.leads:
            self._effects += self.fleet.refused(event, now)

    def _goodbye(self, event: Goodbye, now: float) -> None:
        self._effects += self.fleet.goodbye(event, now)

    # Leadership

    def _beacon(self, event: Beacon, now: float) -> None:
        if event.model != self.rules.model or event.owner == self.owner:
            return
        if self.leadership.heard_beacon(event.epoch, event.owner, now):
            self._step_down(event.epoch, event.owner, now)

    def _lease_seen(self, event: LeaseSeen, now: float) -> None:
        if not event.known:
            self.leadership.lease_unknown(now)
        elif self.leadership.heard_lease(event.epoch, event.owner, event.ttl_s, now):
            self._step_down(event.epoch, event.owner, now)

    def _outranked(self, epoch: int, owner: str, now: float) -> bool:
        """G3: whoever shows us a higher leadership ends ours."""
        if not self.leadership.heard(epoch, owner):
            return False
        self._step_down(epoch, owner, now)
        return True

    def _step_down(self, epoch: int, owner: str, now: float) -> None:
        self.leadership.follow(now)
        self.desk.clear()
        self.fleet.clear()
        self._effects += [Follow(), Note("stepped_down", {"epoch": epoch, "owner": owner})]

    def _claim(self, now: float) -> None:
        self.leadership.claim(now)
        epoch = self.leadership.epoch
        self.fleet.epoch, self.fleet.owner = epoch, self.owner
        self.planner.epoch, self.planner.owner = epoch, self.owner
        self.desk.open(epoch, self.owner, now)
        self._effects += [Note("claiming", {"epoch": epoch}), WriteLease(epoch, self.owner)]
        self._effects += self.fleet.claim_all(now)
        if not self.fleet.unanswered():
            self._lead(now)

    def _lead(self, now: float) -> None:
        self.leadership.lead()
        self._manned_at = now
        self.counters.takeovers += 1
        self._effects += [Lead(), Note("leading", {"epoch": self.leadership.epoch})]
        self._beat_drum(now)

    def _beat_drum(self, now: float) -> None:
        """The beacon and the lease, every 0.5 s."""
        self._beacon_at = now + self.rules.leadership.beacon_s
        epoch = self.leadership.epoch
        beacon = Beacon(
            model=self.rules.model,
            epoch=epoch,
            owner=self.owner,
            instances=self.fleet.last_frames(),
            clients=self.desk.last_frames(),
        )
        self._effects += [SendBeacon(beacon), WriteLease(epoch, self.owner)]

    def _connected(self, event: Connected, now: float) -> None:
        if event.up and not self.connected:
            self._forgive(now)
        self.connected = event.up

    def _forgive(self, now: float) -> None:
        """We were deaf; nobody else's silence counts."""
        self._manned_at = now
        self.leadership.silence_forgiven(now)
        self.desk.forgive(now)
        self.fleet.forgive(now)

    def _stop(self, event: Stop, now: float) -> None:
        if self.leadership.rule is not Rule.FOLLOWER:
            self._effects.append(DropLease(self.leadership.epoch, self.owner))
            self.leadership.follow(now)
            self._effects.append(Follow())

    # Time

    def _tick(self, event: Tick, now: float) -> None:
        leadership = self.leadership
        leadership.last_tick = now
        if not self.connected:
            return
        if leadership.rule is Rule.FOLLOWER:
            if leadership.may_claim(now):
                self._claim(now)
            return
        if leadership.rule is Rule.CLAIMING:
            if now - leadership.claiming_since >= self.rules.leadership.claim_timeout_s:
                self._lead(now)
            else:
                self._effects += self.fleet.tick(now)
            return
        if now >= self._beacon_at:
            self._beat_drum(now)
        if now < leadership.listening_until:
            return
        if self.fleet.is_manned:
            self._manned_at = now
        self._effects += self.fleet.tick(now)
        self._effects += self.desk.tick(now)
        if len(self.desk.queue) and any(i.info.tier for i in self.fleet.choices):
            # What a tier holds changes while they wait.
            fetch = self.rules.fetch
            first = islice(self.desk.queue, fetch.refresh_first)
            self._look_up([seq for seq in first if now - seq.asked_at > fetch.refresh_s], now)

    def _wake(self, now: float) -> None:
        """G4: after a pause of our own, beacon first and listen before anything else is sent."""
        leadership = self.leadership
        self._effects.append(Note("woke_up", {"after_s": round(now - leadership.last_tick, 3)}))
        leadership.last_tick = now
        self._forgive(now)
        if self.leads:
            leadership.listening_until = now + self.rules.leadership.settle_s
            self._beat_drum(now)

    def _turn(self, event: Turn, now: float) -> None:
        if not self.leads or now < self.leadership.listening_until:
            return
        arrivals = self.desk.take_arrivals()
        if self.fleet.joined:
            # What came while nobody could fetch it has not been looked up, or long ago.
            self.fleet.joined = False
            new = set(arrivals)
            first = islice(self.desk.queue, self.rules.fetch.refresh_first)
            arrivals += [sequence for sequence in first if sequence not in new]
        if arrivals:
            self._look_up(arrivals, now)
        effects = self._effects
        self._plan(effects, now)
        effects += self.desk.collect(now)

    def _look_up(self, arrivals: list[Sequence], now: float) -> None:
        """Ask the shared index how far tiers hold what begins to wait, where the answer could matter. What
        the instances hold is in our own tables."""
        choices, fetching = self.fleet.choices, self.planner.fetching
        asked: dict[tuple[str, bytes], LookUp] = {}
        for sequence in arrivals:
            sequence.asked_at = now
            hold_s = fetching.hold_s(sequence, choices)
            hashes = prefix_hashes(choices[0], sequence) if hold_s else []
            if not hashes:
                continue
            if sequence.fetch is None:
                sequence.hold_until = now + hold_s
            client, handle = sequence.request.client.id, sequence.handle
            known = asked.get((client, hashes[-1]))
            handles = (*known.handles, handle) if known else (handle,)
            asked[client, hashes[-1]] = LookUp(client, handles, hashes, hold_s)
        self._effects += asked.values()

    def _plan(self, effects: list[Effect], now: float) -> None:
        """Frames for every instance until its window is full or there is nothing to do."""
        if self.desk.swamped:
            return
        rules, queue, fleet = self.rules.budget, self.desk.queue, self.fleet
        open_ = fleet.active
        if len(open_) > 1 and len(queue):
            # Who is asked first gets what is equally good anywhere.
            open_ = open_.copy()
            self.planner.rng.shuffle(open_)
        open_ = [i for i in open_ if rules.refills(len(i.in_flight), i.fit.step_s)]
        while open_:
            # One frame each in turn, so that what waits is spread before anybody's window is full.
            unfilled = []
            for instance in open_:
                if len(instance.in_flight) < rules.depth(instance.fit.step_s):
                    frame = self.planner.plan(instance, queue, fleet.choices, now)
                    if frame is not None:
                        effects.append(SendStep(frame.step))
                        unfilled.append(instance)
            open_ = unfilled

    def check(self) -> None:
        """Raises AssertionError where the books contradict each other; for tests, and when idle."""
        self.fleet.check()
        self.desk.check()
