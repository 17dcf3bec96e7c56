"""The gate against its table and against an oracle that remembers everything (docs/protocol.md §3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.gate import ClaimVerdict, Gate, Leadership, Verdict
from shared.ids import MAX_EPOCH

HELD = (5, "m", 101)


def held_gate(seen: int = 3) -> Gate:
    gate = Gate(100)
    gate.claim(5, "m", "c1", 101)
    for seq in range(1, seen + 1):
        gate.judge(*HELD, seq)
    return gate


@pytest.mark.parametrize(
    ("frame", "verdict"),
    [
        ((5, "m", 101, 4), Verdict.RUN),
        ((5, "m", 101, 3), Verdict.DUPLICATE),
        ((5, "m", 101, 1), Verdict.DUPLICATE),
        ((5, "m", 101, 0), Verdict.DUPLICATE),
        ((5, "m", 101, 5), Verdict.GAP),
        ((5, "m", 101, 99), Verdict.GAP),
        ((4, "m", 101, 4), Verdict.STALE),
        ((5, "z", 101, 4), Verdict.STALE),
        ((5, "m", 100, 4), Verdict.STALE),
        ((5, "m", 102, 4), Verdict.STALE),
        # Whoever leads now has to claim first.
        ((6, "m", 101, 4), Verdict.STALE),
        ((5, "a", 101, 4), Verdict.STALE),
    ],
)
def test_verdict_on_a_frame_after_three_were_seen(frame: tuple[int, str, int, int], verdict: Verdict) -> None:
    gate = held_gate()
    assert gate.judge(*frame) is verdict
    assert gate.seen_seq == (4 if verdict is Verdict.RUN else 3)


@pytest.mark.parametrize(
    ("one", "other", "outranks"),
    [
        ((2, "z"), (1, "a"), True),
        ((1, "a"), (2, "z"), False),
        ((1, "a"), (1, "b"), True),
        ((1, "b"), (1, "a"), False),
        ((1, "a"), (1, "a"), False),
    ],
)
def test_a_higher_epoch_outranks_and_of_equal_epochs_the_smaller_owner(
    one: tuple[int, str], other: tuple[int, str], outranks: bool
) -> None:
    assert Leadership(*one).outranks(Leadership(*other)) is outranks


def test_before_any_claim_every_frame_is_stale() -> None:
    gate = Gate(100)
    for epoch, owner in ((0, ""), (1, "a"), (-1, "")):
        assert gate.judge(epoch, owner, 100, 1) is Verdict.STALE


def test_a_repeated_claim_id_repeats_its_incarnation_and_keeps_the_session() -> None:
    gate = held_gate()
    assert gate.claim(5, "m", "c1", 999) == (ClaimVerdict.REPEATED, 101)
    assert gate.judge(*HELD, 4) is Verdict.RUN
    assert gate.claim(5, "m", "c2", 102) == (ClaimVerdict.ACCEPTED, 102)
    assert gate.claim(5, "m", "c1", 999) == (ClaimVerdict.REPEATED, 101)
    assert gate.incarnation == 102


def test_a_lower_claim_is_refused_also_with_a_known_claim_id() -> None:
    gate = held_gate()
    assert gate.claim(4, "m", "c9", 102)[0] is ClaimVerdict.REFUSED
    assert gate.claim(5, "z", "c9", 102)[0] is ClaimVerdict.REFUSED
    gate.claim(6, "z", "d1", 102)
    assert gate.claim(5, "m", "c1", 103)[0] is ClaimVerdict.REFUSED


def test_a_beacon_heard_fences_everybody_below_it() -> None:
    gate = held_gate()
    gate.observe(5, "m")
    gate.observe(3, "a")
    assert gate.judge(*HELD, 4) is Verdict.RUN
    gate.observe(6, "x")
    assert gate.judge(*HELD, 5) is Verdict.STALE
    assert gate.claim(5, "m", "c2", 102)[0] is ClaimVerdict.REFUSED
    assert gate.claim(6, "x", "d1", 102)[0] is ClaimVerdict.ACCEPTED


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 2**63, 2**64 - 1])
def test_an_epoch_that_is_nonsense_fences_nobody_and_is_given_no_session(epoch: int) -> None:
    gate = held_gate()
    gate.observe(epoch, "a")
    assert gate.claim(epoch, "a", "d1", 102)[0] is ClaimVerdict.REFUSED
    assert gate.judge(*HELD, 4) is Verdict.RUN
    assert gate.claim(6, "m", "e1", 103)[0] is ClaimVerdict.ACCEPTED


def test_an_abandoned_session_needs_a_claim_that_starts_a_new_one() -> None:
    gate = held_gate()
    gate.abandon(102)
    assert gate.judge(*HELD, 4) is Verdict.STALE
    assert gate.judge(5, "m", 102, 1) is Verdict.STALE
    assert gate.claim(5, "m", "c1", 103) == (ClaimVerdict.ACCEPTED, 103)


def test_an_incarnation_that_does_not_rise_is_refused_loudly() -> None:
    with pytest.raises(ValueError, match="must rise"):
        Gate(100).claim(1, "a", "c", 100)


class Oracle:
    """Remembers the whole history and decides from it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.accepted: list[tuple[int, str, str, int]] = []
        self.ran: set[int] = set()

    def below_highest(self, epoch: int, owner: str) -> bool:
        return any(e > epoch or (e == epoch and o < owner) for e, o in self.seen)

    def claim(self, epoch: int, owner: str, claim_id: str, fresh: int) -> ClaimVerdict:
        if self.below_highest(epoch, owner):
            return ClaimVerdict.REFUSED
        if (epoch, owner, claim_id) in {row[:3] for row in self.accepted}:
            return ClaimVerdict.REPEATED
        self.seen.append((epoch, owner))
        self.accepted.append((epoch, owner, claim_id, fresh))
        self.ran = set()
        return ClaimVerdict.ACCEPTED

    def judge(self, epoch: int, owner: str, incarnation: int, seq: int) -> Verdict:
        held = self.accepted[-1] if self.accepted else None
        if (
            held is None
            or self.below_highest(epoch, owner)
            or (epoch, owner, incarnation) != (held[0], held[1], held[3])
        ):
            return Verdict.STALE
        if seq in self.ran or seq < 1:
            return Verdict.DUPLICATE
        if seq != len(self.ran) + 1:
            return Verdict.GAP
        self.ran.add(seq)
        return Verdict.RUN


leaders = st.tuples(st.integers(1, 3), st.sampled_from("abc"))
moves = st.one_of(
    st.tuples(st.just("claim"), leaders, st.sampled_from("xyz")),
    st.tuples(st.just("beacon"), leaders, st.none()),
    st.tuples(st.just("frame"), leaders, st.tuples(st.integers(-1, 0), st.integers(-1, 2))),
)


@given(st.lists(moves, max_size=60))
def test_the_gate_decides_like_an_oracle_that_remembers_everything(history: list) -> None:
    gate, oracle, fresh = Gate(0), Oracle(), 0
    for kind, (epoch, owner), detail in history:
        if kind == "claim":
            fresh += 1
            assert gate.claim(epoch, owner, detail, fresh)[0] is oracle.claim(epoch, owner, detail, fresh)
        elif kind == "beacon":
            gate.observe(epoch, owner)
            oracle.seen.append((epoch, owner))
        else:
            life, ahead = detail
            frame = (epoch, owner, gate.incarnation + life, gate.seen_seq + ahead)
            assert gate.judge(*frame) is oracle.judge(*frame)
