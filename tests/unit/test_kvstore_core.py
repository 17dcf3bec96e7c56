"""The core of kvstore: what it writes and asks for, in virtual time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.core import (
    ASK_EVERY_S,
    ASKS_PER_TICK,
    TTL_S,
    AskRestate,
    BeginRow,
    BusChanged,
    ChangeRow,
    DutyChanged,
    Effect,
    Forget,
    KvCore,
    PutRecord,
    RowLost,
    RowsFound,
    Tick,
)
from shared.wire import InstanceInfo, KvEvents


def info(name: str = "w0", born: int = 1, **changes: object) -> InstanceInfo:
    fields = {
        "instance": name,
        "model": "m",
        "fingerprint": "f",
        "role": "mixed",
        "state": "ready",
        "born": born,
        "block_tokens": 16,
        "blocks_total": 100,
        "max_slots": 4,
        "max_len": 100,
        "vocab_size": 50,
        "max_step_tokens": 64,
    }
    return InstanceInfo(**{**fields, **changes})  # type: ignore[arg-type]


def event(seq: int, name: str = "w0", born: int = 1, **content: object) -> KvEvents:
    return KvEvents(instance=name, born=born, seq=seq, info=info(name, born), **content)  # type: ignore[arg-type]


@pytest.fixture
def core() -> KvCore:
    fresh = KvCore()
    fresh.handle(DutyChanged(True), 0.0)
    return fresh


def asked(effects: list[Effect]) -> list[str]:
    return [effect.instance for effect in effects if isinstance(effect, AskRestate)]


def rows(effects: list[Effect]) -> list[Effect]:
    """Writes to the index; mere questions whether a row is still there left out."""
    return [
        e
        for e in effects
        if isinstance(e, BeginRow | Forget) or (isinstance(e, ChangeRow) and (e.stored or e.removed))
    ]


def test_the_first_event_of_a_life_is_followed_without_a_restate(core: KvCore) -> None:
    effects = core.handle(event(1, stored=[b"a"]), 0.0)
    assert rows(effects) == [BeginRow("m", "w0", 1), ChangeRow("m", "w0", 1, (b"a",))]
    assert asked(core.handle(Tick(), 0.1)) == []
    assert rows(core.handle(event(2, stored=[b"b"], removed=[b"a"]), 0.2)) == [
        ChangeRow("m", "w0", 1, (b"b",), (b"a",))
    ]
    assert core.blocks == {"w0": 1}


def test_an_instance_first_heard_in_the_middle_of_its_life_is_asked_and_followed_from_its_restate(
    core: KvCore,
) -> None:
    assert rows(core.handle(event(7, stored=[b"a"]), 0.0)) == []
    assert asked(core.handle(Tick(), 0.1)) == ["w0"]
    effects = core.handle(event(8, stored=[b"x"], restate="begin"), 0.2)
    assert rows(effects) == [BeginRow("m", "w0", 1), ChangeRow("m", "w0", 1, (b"x",))]
    assert rows(core.handle(event(9, stored=[b"y"], restate="part"), 0.3)) == [
        ChangeRow("m", "w0", 1, (b"y",))
    ]
    assert core.blocks == {"w0": 2}


def test_a_gap_stops_following_until_the_restate_and_asks_no_more_often_than_allowed(core: KvCore) -> None:
    core.handle(event(1), 0.0)
    assert rows(core.handle(event(3, stored=[b"c"]), 0.1)) == []
    assert asked(core.handle(Tick(), 0.2)) == ["w0"]
    assert asked(core.handle(Tick(), 0.3)) == []
    assert asked(core.handle(Tick(), 0.2 + ASK_EVERY_S)) == ["w0"]
    assert core.counts.gaps == 1
    assert rows(core.handle(event(4, restate="begin"), 1.4)) == [BeginRow("m", "w0", 1)]
    assert asked(core.handle(Tick(), 2.3)) == []


def test_repeated_and_old_events_change_nothing(core: KvCore) -> None:
    core.handle(event(1, stored=[b"a"]), 0.0)
    core.handle(event(2, removed=[b"a"]), 0.1)
    assert rows(core.handle(event(1, stored=[b"a"]), 0.2)) == []
    core.handle(event(1, born=2, stored=[b"n"]), 0.3)
    assert rows(core.handle(event(9, born=1, stored=[b"o"], restate="begin"), 0.4)) == []
    assert core.counts.repeated == 2


def test_a_new_life_forgets_the_former_one(core: KvCore) -> None:
    core.handle(event(1, stored=[b"a"]), 0.0)
    effects = core.handle(event(1, born=2), 0.1)
    assert rows(effects) == [Forget("m", "w0"), BeginRow("m", "w0", 2)]


def test_an_instance_silent_for_three_heartbeats_is_forgotten(core: KvCore) -> None:
    core.handle(event(1), 0.0)
    for tenth in range(1, round(TTL_S * 10) + 1):
        assert Forget("m", "w0") not in core.handle(Tick(), tenth / 10)
    assert core.handle(Tick(), TTL_S + 0.2) == [Forget("m", "w0")]
    assert core.heard_of == 0


def test_silence_proves_nothing_while_we_are_disconnected_or_stood_still(core: KvCore) -> None:
    core.handle(event(1), 0.0)
    core.handle(Tick(), 0.1)
    core.handle(BusChanged(False), 0.2)
    for second in range(1, 60):
        assert core.handle(Tick(), second * 0.9) == []
    core.handle(BusChanged(True), 54.0)
    assert core.handle(Tick(), 54.1) == []
    assert core.handle(Tick(), 154.1) == []
    assert core.heard_of == 1


def test_records_follow_the_heartbeats_and_changes_of_state_not_every_event(core: KvCore) -> None:
    def records(effects: list[Effect]) -> list[str]:
        return [e.record.info.state for e in effects if isinstance(e, PutRecord)]

    assert records(core.handle(event(1), 0.0)) == ["ready"]
    assert records(core.handle(event(2), 0.02)) == []
    draining = KvEvents(instance="w0", born=1, seq=3, info=info(state="draining"))
    assert records(core.handle(draining, 0.04)) == ["draining"]
    assert records(core.handle(event(4), 1.0)) == ["ready"]


def test_a_heartbeat_without_changes_asks_whether_the_row_is_still_there(core: KvCore) -> None:
    core.handle(event(1), 0.0)
    assert ChangeRow("m", "w0", 1) in core.handle(event(2), 1.0)
    core.handle(RowLost("w0", 1), 1.1)
    assert asked(core.handle(Tick(), 1.2)) == ["w0"]
    assert core.counts.rows_lost == 1


def test_nothing_is_written_without_the_duty_and_everybody_restates_when_it_comes_back(core: KvCore) -> None:
    for n in range(10):
        core.handle(event(1, name=f"w{n}"), 0.0)
    core.handle(Tick(), 0.0)
    core.handle(DutyChanged(False, "store was away"), 0.1)
    assert core.handle(event(2, stored=[b"a"]), 0.2) == []
    assert core.handle(Tick(), 0.3) == []
    core.handle(DutyChanged(True), 0.4)
    names: list[str] = []
    for tenth in (5, 6, 7):
        batch = asked(core.handle(Tick(), tenth / 10))
        assert len(batch) <= ASKS_PER_TICK
        names += batch
    assert sorted(names) == sorted(f"w{n}" for n in range(10))


def test_rows_that_nobody_speaks_for_are_forgotten_after_three_heartbeats(core: KvCore) -> None:
    core.handle(event(1), 0.0)
    core.handle(RowsFound("m", frozenset({"w0", "dead", "late"})), 0.0)
    core.handle(event(5, name="late"), 1.0)
    forgotten = []
    for tenth in range(1, 40):
        core.handle(event(1 + tenth), tenth / 10)
        core.handle(event(5 + tenth, name="late"), tenth / 10)
        forgotten += [e for e in core.handle(Tick(), tenth / 10) if isinstance(e, Forget)]
    assert forgotten == [Forget("m", "dead")]


class Instance:
    """An instance as the protocol describes it; `truth` is what it holds."""

    def __init__(self, name: str, born: int) -> None:
        self.name, self.born, self.seq = name, born, 0
        self.truth: set[bytes] = set()

    def change(self, rng: random.Random) -> KvEvents:
        stored = {bytes([rng.randrange(40)]) for _ in range(rng.randrange(4))} - self.truth
        removed = set(rng.sample(sorted(self.truth), min(len(self.truth), rng.randrange(3))))
        self.truth = (self.truth | stored) - removed
        return self._event(stored=sorted(stored), removed=sorted(removed))

    def restate(self) -> list[KvEvents]:
        held = sorted(self.truth)
        first, rest = held[:3], held[3:]
        return [
            self._event(stored=first, restate="begin"),
            *(self._event(stored=[h], restate="part") for h in rest),
        ]

    def heartbeat(self) -> KvEvents:
        return self._event()

    def _event(self, **content: object) -> KvEvents:
        self.seq += 1
        return event(self.seq, self.name, self.born, **content)


class Index:
    """Carries out effects on plain sets; a row that is not there is lost, as in the store."""

    def __init__(self, core: KvCore) -> None:
        self.core = core
        self.rows: dict[str, set[bytes]] = {}

    def apply(self, effects: list[Effect], now: float) -> list[str]:
        """The names asked for a restate."""
        for effect in effects:
            match effect:
                case BeginRow(_, name, _):
                    self.rows[name] = set()
                case Forget(_, name):
                    self.rows.pop(name, None)
                case ChangeRow(_, name, born, stored, removed):
                    if name not in self.rows:
                        self.core.handle(RowLost(name, born), now)
                    else:
                        self.rows[name] |= set(stored)
                        self.rows[name] -= set(removed)
        return asked(effects)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_losses_outages_and_restarts_the_index_equals_what_the_instances_hold(seed: int) -> None:
    rng = random.Random(seed)
    core = KvCore()
    index = Index(core)
    now = 0.0
    lives = 0
    instances: dict[str, Instance] = {}
    loss = 0.3

    def hear(some: list[KvEvents]) -> None:
        for frame in some:
            if rng.random() < loss:
                continue
            for _ in range(1 + (rng.random() < loss / 3)):
                assert index.apply(core.handle(frame, now), now) == []

    def tick() -> None:
        for name in index.apply(core.handle(Tick(), now), now):
            if name in instances and rng.random() >= loss:
                hear(instances[name].restate())

    for _ in range(200):
        now += 0.1
        name = f"w{rng.randrange(4)}"
        move = rng.choice(["change"] * 8 + ["start", "die", "duty", "flush", "bus", "look"])
        if move == "start":
            lives += 1
            instances[name] = Instance(name, lives)
            hear([instances[name].heartbeat()])
        elif move == "die":
            instances.pop(name, None)
        elif move == "change":
            hear([instances[name].change(rng)] if name in instances else [])
        elif move == "duty":
            core.handle(DutyChanged(rng.random() < 0.6), now)
        elif move == "flush":
            index.rows.clear()
        elif move == "look":
            core.handle(RowsFound("m", frozenset(index.rows)), now)
        else:
            core.handle(BusChanged(rng.random() < 0.5), now)
        tick()

    loss = 0.0
    core.handle(BusChanged(True), now)
    core.handle(DutyChanged(True), now)
    core.handle(RowsFound("m", frozenset(index.rows)), now)
    for _ in range(80):
        now += 0.1
        for instance in instances.values():
            hear([instance.heartbeat()])
        tick()
    assert index.rows == {name: instance.truth for name, instance in instances.items()}
    assert core.blocks == {name: len(instance.truth) for name, instance in instances.items()}
