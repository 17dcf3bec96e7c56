"""For each guard of docs/protocol.md: a fault that is harmless with it and breaks a property without it."""

from collections.abc import Callable
from typing import Any

import pytest
from sim_mesh import Mesh, Violation

from services.scheduler.fleet import Fleet
from services.scheduler.instances import Instance, State, Verdict
from services.scheduler.leadership import Leadership
from services.worker.gate import ClaimVerdict, Gate
from services.worker.gate import Verdict as GateVerdict
from services.worker.session import NOTHING, Session
from shared.client.effects import Open
from shared.wire import Beacon, Claimed, Done, Sampling, Step

Patch = Callable[[pytest.MonkeyPatch], None]
LONG = 60
SOON_S = 8.0
"""Before an instance without results is given up, which would heal what a missing guard broke."""


def ask(mesh: Mesh, name: str, tokens: int = LONG, client: str = "c0", start: int = 0, **spec: Any) -> None:
    prompt = list(range(start, start + 9))
    sampling = Sampling(max_tokens=tokens, seed=start)
    mesh.clients[client].open(Open(request_id=name, prompt=prompt, sampling=sampling, **spec))


def ready(mesh: Mesh) -> None:
    """Run until every worker has passed its canary."""

    def all_ready() -> bool:
        leader = mesh.leader
        if leader is None:
            return False
        states = [i.state for i in leader.core.fleet.instances.values()]
        return len(states) == len(mesh.workers) and set(states) == {State.READY}

    assert mesh.run(6.0, all_ready)


def tokens_of(mesh: Mesh, name: str, client: str = "c0") -> int:
    return len(mesh.history.lines[client, name, 0].tokens)


def finish(mesh: Mesh, within_s: float = 30.0) -> None:
    """Everything must end well, and everything be free again."""
    mesh.run(within_s, mesh.quiet)
    mesh.history.check(allow_trouble=False)
    mesh.run(3.0)
    mesh.check_baseline()


# G1: beacon and lease silent before anybody else claims


def without_g1(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "may_claim", lambda self, now: True)


def standby_beside_a_living_leader() -> None:
    mesh = Mesh(1, schedulers=2)
    mesh.run(2.0)
    ask(mesh, "r")
    finish(mesh, 10.0)
    first = {scheduler.core.leadership.epoch for scheduler in mesh.schedulers.values()}
    if max(first) > 1:
        raise Violation(f"P4: leadership changed hands beside a living leader, epochs {first}")


# G2: an epoch above everything heard, whatever Redis has forgotten


def without_g2(patch: pytest.MonkeyPatch) -> None:
    # What Redis said last, and nothing else.
    def heard(self: Leadership, epoch: int, owner: str) -> bool:
        return self.rule is not self.rule.FOLLOWER and self.fences_us(epoch, owner)

    patch.setattr(Leadership, "heard", heard)
    patch.setattr(Leadership, "next_epoch", lambda self: 1 + self.top_epoch)


def redis_flushed_during_takeover() -> None:
    mesh = Mesh(2, schedulers=1)
    ready(mesh)
    # A second leadership, so that the epoch in force is above the first that anybody would draw.
    mesh.kill(mesh.schedulers[next(iter(mesh.schedulers))])
    mesh.start_scheduler()
    ready(mesh)
    ask(mesh, "r")
    mesh.run(0.3)
    mesh.kill(mesh.schedulers[next(iter(mesh.schedulers))])
    mesh.redis.flush()
    mesh.redis.up = False
    mesh.start_scheduler()
    finish(mesh)


# G3: a leader that sees a higher claim steps down


def without_g3(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "fences_us", lambda self, epoch, owner: False)


def stopped_leader_wakes_beside_its_successor() -> None:
    mesh = Mesh(3, schedulers=2)
    ready(mesh)
    ask(mesh, "r")
    mesh.run(0.3)
    old = mesh.leader
    assert old is not None
    mesh.world.stop(old)
    mesh.run(5.0)
    assert mesh.leader is not old
    mesh.world.wake(old)
    mesh.run(0.5)
    ask(mesh, "later", start=100)
    finish(mesh)


# G4: after a pause of its own a leader beats first and listens


def without_g4(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "woke", lambda self, now: False)


def woken_leader_has_frames_for_a_client_that_heard_nothing_of_the_new_one() -> None:
    mesh = Mesh(4, schedulers=2)
    ready(mesh)
    ask(mesh, "r")
    mesh.run(0.3)
    old, client = mesh.leader, mesh.clients["c0"]
    assert old is not None
    # The client is cut off while the leader still makes frames for it, and through the whole takeover.
    client.cut = True
    mesh.run(0.2)
    mesh.world.stop(old)
    mesh.run(5.0)
    new = mesh.leader
    assert new is not None
    assert new is not old
    # It comes back just when the old leader wakes; the new one's beacon has not reached it yet.
    mesh.world.filter = lambda source, target, frame: not (source == new.name and target == client.name)
    client.cut = False
    before = tokens_of(mesh, "r")
    mesh.world.wake(old)
    mesh.run(0.4)
    if tokens_of(mesh, "r") > before:
        raise Violation("P4: tokens of a fenced epoch were delivered")
    mesh.world.filter = None
    finish(mesh)


# G5: a claim repeated with its id makes no second incarnation


def without_g5(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Gate, epoch: int, owner: str, claim_id: str, fresh: int) -> tuple[ClaimVerdict, int]:
        self._claims.clear()
        return original(self, epoch, owner, claim_id, fresh)

    original = Gate.claim
    patch.setattr(Gate, "claim", claim)


def answers_to_claims_come_late() -> None:
    mesh = Mesh(5)
    world = mesh.world
    send = world.send

    def slow(source: Any, target: Any, frame: Any, deliver: Any) -> None:
        if isinstance(frame, Claimed):
            world.after(0.6, lambda: send(source, target, frame, deliver))
        else:
            send(source, target, frame, deliver)

    world.send = slow  # type: ignore[method-assign]
    mesh.run(2.0)
    ask(mesh, "r")
    finish(mesh)


# G6: a silent instance is lost


def without_g6(patch: pytest.MonkeyPatch) -> None:
    tick = Fleet.tick

    def patient(self: Fleet, now: float) -> list[Any]:
        for instance in self.instances.values():
            if instance.planned:
                instance.heard_at = now
        return tick(self, now)

    patch.setattr(Fleet, "tick", patient)


def an_instance_dies_for_good() -> None:
    mesh = Mesh(6, workers=2)
    ready(mesh)
    for number in range(6):
        ask(mesh, f"r{number}", start=number * 50)
    mesh.run(0.3)
    mesh.kill(mesh.workers["w0"])
    finish(mesh, SOON_S)


# G7: results of a former incarnation cannot match


def without_g7(patch: pytest.MonkeyPatch) -> None:
    def judge(self: Instance, done: Done, epoch: int, owner: str) -> Verdict:
        if done.seq < self.expected:
            return Verdict.KNOWN
        return Verdict.GAP if done.seq > self.expected or not self.in_flight else Verdict.NEXT

    patch.setattr(Instance, "judge", judge)


def results_of_a_former_session_arrive_in_the_next() -> None:
    mesh = Mesh(7)
    old: dict[int, Done] = {}
    first: list[int] = []

    def watch(source: str, target: str, frame: Any) -> bool:
        if isinstance(frame, Done):
            first[:] = first or [frame.incarnation]
            if frame.incarnation == first[0]:
                old[frame.seq] = frame
            elif frame.seq in old and mesh.leader is not None:
                mesh.leader.feed(old.pop(frame.seq))
        return True

    mesh.world.filter = watch
    ready(mesh)
    ask(mesh, "r")
    mesh.run(0.4)
    # Long enough to be given up, too short to die.
    mesh.workers["w0"].cut = True
    mesh.run(3.0)
    mesh.workers["w0"].cut = False
    finish(mesh)


# G8: a missing result is asked for by sending its frame again


def without_g8(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "_resend", lambda self, instance, first, now: [])


def one_result_is_lost() -> None:
    mesh = Mesh(8)
    ready(mesh)
    lose_one(mesh, Done)
    ask(mesh, "r")
    finish(mesh, SOON_S)


def lose_one(mesh: Mesh, kind: type, after: int = 4) -> None:
    seen = 0

    def drop(source: str, target: str, frame: Any) -> bool:
        nonlocal seen
        seen += isinstance(frame, kind)
        return not (isinstance(frame, kind) and seen == after)

    mesh.world.filter = drop


# G9: the gate refuses frames of a fenced leader or of a former session


def without_g9(patch: pytest.MonkeyPatch) -> None:
    def judge(self: Gate, epoch: int, owner: str, incarnation: int, seq: int) -> GateVerdict:
        expected = self.seen_seq + 1
        if seq == expected:
            self.seen_seq = seq
            return GateVerdict.RUN
        return GateVerdict.DUPLICATE if seq < expected else GateVerdict.GAP

    patch.setattr(Gate, "judge", judge)


def frames_of_a_fenced_leader_arrive_late() -> None:
    mesh = Mesh(9)
    old: dict[int, Step] = {}
    first: list[int] = []

    def watch(source: str, target: str, frame: Any) -> bool:
        if isinstance(frame, Step):
            first[:] = first or [frame.incarnation]
            if frame.incarnation == first[0]:
                old[frame.seq] = frame
            elif frame.seq in old:
                worker = mesh.workers["w0"]
                # Whatever session the worker is in: a stale frame names its own.
                worker.compute.session, session = old[frame.seq].incarnation, worker.compute.session
                stale = old.pop(frame.seq)
                worker.on_step(stale)
                worker.compute.session = session
        return True

    mesh.world.filter = watch
    ready(mesh)
    ask(mesh, "r")
    mesh.run(0.4)
    assert mesh.leader is not None
    mesh.kill(mesh.leader)
    mesh.start_scheduler()
    finish(mesh)


# G10: a frame behind a gap is not run


def without_g10(patch: pytest.MonkeyPatch) -> None:
    judge = Gate.judge

    def lax(self: Gate, epoch: int, owner: str, incarnation: int, seq: int) -> GateVerdict:
        verdict = judge(self, epoch, owner, incarnation, seq)
        if verdict is GateVerdict.GAP:
            self.seen_seq = seq
            return GateVerdict.RUN
        return verdict

    patch.setattr(Gate, "judge", lax)


def one_frame_in_the_middle_is_lost() -> None:
    mesh = Mesh(10)
    ready(mesh)
    lose_one(mesh, Step, after=1)
    ask(mesh, "r")
    finish(mesh, SOON_S)


# G11: the beacon exposes lost last frames


def without_g11(patch: pytest.MonkeyPatch) -> None:
    on_beacon = Session.on_beacon

    def deaf(self: Session, beacon: Beacon, now: float) -> Any:
        listed = beacon.instances.get(self.info.instance)
        if listed is not None and listed[0] == self.gate.incarnation and listed[1] > self.gate.seen_seq:
            return NOTHING
        return on_beacon(self, beacon, now)

    patch.setattr(Session, "on_beacon", deaf)


def the_last_frames_are_lost() -> None:
    mesh = Mesh(11)
    ready(mesh)
    until = mesh.world.now + 0.35
    mesh.world.filter = lambda source, target, frame: not (isinstance(frame, Step) and mesh.world.now < until)
    ask(mesh, "r")
    finish(mesh, SOON_S)


# G12: what frames in flight name is not reused


def without_g12(patch: pytest.MonkeyPatch) -> None:
    def rest(self: Instance, blocks: list[int], slot: int, until: int) -> None:
        self.pool.release(blocks)
        if slot >= 0:
            self.free_slots.append(slot)

    patch.setattr(Instance, "rest", rest)


def slots_change_hands_while_frames_are_in_flight() -> None:
    mesh = Mesh(12, slots=2, blocks=40)
    ready(mesh)
    for number in range(8):
        ask(mesh, f"r{number}", start=number * 50, tokens=30)
        mesh.world.after(0.11 * number, lambda number=number: mesh.clients["c0"].close(f"r{number - 1}"))  # type: ignore[misc]
    finish(mesh)


GUARDS: dict[str, tuple[Callable[[], None], Patch]] = {
    "G1": (standby_beside_a_living_leader, without_g1),
    "G2": (redis_flushed_during_takeover, without_g2),
    "G3": (stopped_leader_wakes_beside_its_successor, without_g3),
    "G4": (woken_leader_has_frames_for_a_client_that_heard_nothing_of_the_new_one, without_g4),
    "G5": (answers_to_claims_come_late, without_g5),
    "G6": (an_instance_dies_for_good, without_g6),
    "G7": (results_of_a_former_session_arrive_in_the_next, without_g7),
    "G8": (one_result_is_lost, without_g8),
    "G9": (frames_of_a_fenced_leader_arrive_late, without_g9),
    "G10": (one_frame_in_the_middle_is_lost, without_g10),
    "G11": (the_last_frames_are_lost, without_g11),
    "G12": (slots_change_hands_while_frames_are_in_flight, without_g12),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_the_fault_is_harmless_with_the_guard(guard: str):
    GUARDS[guard][0]()


@pytest.mark.parametrize("guard", GUARDS)
def test_the_fault_breaks_a_property_without_the_guard(guard: str, monkeypatch: pytest.MonkeyPatch):
    fault, remove = GUARDS[guard]
    remove(monkeypatch)
    with pytest.raises(Violation) as caught:
        fault()
    print(f"without {guard}: {caught.value}")
