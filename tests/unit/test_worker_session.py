"""What rank 0 answers, and what it tells the kvstore: pure, with time as an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.gate import ClaimVerdict, Verdict
from services.worker.hashes import BlockHashes
from services.worker.session import COMPLAIN_EVERY_S, RESULTS_KEPT, Session
from shared.ids import BlockHash
from shared.kv_events import KvEventLog
from shared.wire import Beacon, Beat, Claim, Done, InstanceInfo, KvEvents, Refused, Resync, Step

INFO = InstanceInfo("w0", "m", "fp", "mixed", "ready", 100, 16, 64, 8, 256, 1000, 512)


def claimed_session() -> Session:
    session = Session(INFO)
    session.on_claim(Claim(epoch=2, owner="m", claim_id="c"), 101)
    return session


def frame(seq: int, epoch: int = 2, incarnation: int = 101) -> Step:
    return Step(instance="w0", epoch=epoch, owner="m", incarnation=incarnation, seq=seq)


def done(seq: int, incarnation: int = 101) -> Done:
    return Done(
        instance="w0", epoch=2, owner="m", incarnation=incarnation, seq=seq, slots=[seq], tokens=[seq]
    )


def beacon(**changes: object) -> Beacon:
    content: dict[str, object] = {"model": "m", "epoch": 2, "owner": "m", "instances": {"w0": (101, 0)}}
    return Beacon(**content | changes)  # type: ignore[arg-type]


def test_results_are_repeated_until_64_more_are_done() -> None:
    session = claimed_session()
    for seq in range(1, RESULTS_KEPT + 2):
        assert session.on_step(frame(seq), 0.0)[1].run
        assert session.on_result(done(seq))
    assert session.on_step(frame(1), 0.0)[1].done is None
    assert session.on_step(frame(2), 0.0)[1].done == done(2)
    assert session.beat().done_seq == RESULTS_KEPT + 1


def test_a_duplicate_of_a_frame_still_being_computed_is_not_answered() -> None:
    session = claimed_session()
    session.on_step(frame(1), 0.0)
    verdict, reaction = session.on_step(frame(1), 0.0)
    assert verdict is Verdict.DUPLICATE
    assert (reaction.run, reaction.done, reaction.say) == (False, None, [])


def test_a_result_of_a_former_session_is_neither_kept_nor_counted() -> None:
    session = claimed_session()
    session.on_claim(Claim(epoch=2, owner="m", claim_id="d"), 102)
    assert not session.on_result(done(1))
    assert session.done_seq == 0


def test_gaps_are_named_again_after_a_while_in_case_the_first_word_was_lost() -> None:
    session = claimed_session()
    said = [len(session.on_step(frame(9), now)[1].say) for now in (0.0, 0.05, COMPLAIN_EVERY_S, 0.15)]
    assert said == [1, 0, 1, 0]
    (resync,) = session.on_step(frame(9), 1.0)[1].say
    assert resync == Resync(instance="w0", epoch=2, owner="m", incarnation=101, have_seq=0)


def test_a_stale_sender_learns_who_leads_and_which_incarnation_is_ours() -> None:
    session = claimed_session()
    for now, stale in enumerate((frame(1, epoch=1), frame(1, incarnation=99))):
        refused, beat = session.on_step(stale, float(now))[1].say
        assert refused == Refused(instance="w0", epoch=2, owner="m")
        assert isinstance(beat, Beat)
        assert beat.incarnation == 101


@pytest.mark.parametrize(
    ("heard", "kinds"),
    [
        (beacon(), []),
        (beacon(instances={"w0": (101, 3)}), [Resync]),
        (beacon(instances={"w0": (99, 0)}), [Beat]),
        (beacon(instances={}), [Beat]),
        (beacon(epoch=3, instances={}), [Beat]),
        (beacon(epoch=1), [Refused, Beat]),
        (beacon(owner="z"), [Refused, Beat]),
        (beacon(model="other", epoch=9, instances={}), []),
    ],
)
def test_what_a_beacon_is_answered_with(heard: Beacon, kinds: list[type]) -> None:
    assert [type(message) for message in claimed_session().on_beacon(heard, 0.0).say] == kinds


def test_a_broken_session_is_announced_as_failed_under_a_new_incarnation_until_claimed() -> None:
    session = claimed_session()
    session.on_step(frame(1), 0.0)
    assert session.on_broken(101, "block is 99", 102)
    assert not session.on_broken(101, "the frames behind it", 103)
    beat = session.beat()
    assert (beat.info.state, beat.incarnation, beat.seen_seq) == ("failed", 102, 0)
    assert ("failure", "block is 99") in beat.info.detail
    assert session.on_step(frame(2), 1.0)[0] is Verdict.STALE
    assert session.on_claim(Claim(epoch=2, owner="m", claim_id="c"), 103) == (ClaimVerdict.ACCEPTED, 103)
    assert session.beat().info == INFO


def test_draining_outlives_a_claim() -> None:
    session = claimed_session()
    session.drain(undo=False)
    session.on_claim(Claim(epoch=3, owner="m", claim_id="c"), 102)
    assert session.info.state == "draining"
    session.drain(undo=True)
    assert session.info.state == "ready"


class Reader:
    """A kvstore that reads events as docs/protocol.md §6 says."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.seq = 0

    def read(self, event: KvEvents) -> None:
        assert event.seq == self.seq + 1
        self.seq = event.seq
        if event.restate == "begin":
            self.hashes.clear()
        assert not set(event.stored) & self.hashes
        assert set(event.removed) <= self.hashes
        self.hashes |= set(event.stored)
        self.hashes -= set(event.removed)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 7), st.integers(0, 5)),
            st.tuples(st.just("forget"), st.integers(0, 7), st.just(0)),
            st.tuples(st.sampled_from(["step", "tell", "restate"]), st.just(0), st.just(0)),
        ),
        max_size=80,
    )
)
def test_a_reader_of_the_events_knows_what_the_blocks_hold(moves: list[tuple[str, int, int]]) -> None:
    hashes, log, reader = BlockHashes(8), KvEventLog("w0", 1), Reader()
    for kind, block, content in [*moves, ("step", 0, 0), ("tell", 0, 0)]:
        match kind:
            case "store":
                hashes.store(block, BlockHash(bytes([content])))
            case "forget":
                hashes.forget(block)
            case "step":
                log.note(*hashes.take_changes())
            case "tell":
                for event in log.take(INFO):
                    reader.read(event)
            case "restate":
                for event in log.restate(hashes.all_hashes(), INFO):
                    reader.read(event)
    held = {block_hash for block in range(8) if (block_hash := hashes.of(block))}
    assert reader.hashes == held
    assert len(hashes) == len(held)


def test_a_large_restate_comes_in_parts_of_ten_thousand() -> None:
    names = [number.to_bytes(32, "big") for number in range(25_000)]
    events = KvEventLog("w0", 1).restate(names, INFO)
    assert [(event.restate, len(event.stored)) for event in events] == [
        ("begin", 10_000),
        ("part", 10_000),
        ("part", 5_000),
    ]
    log = KvEventLog("w0", 1)
    log.note(names, [])
    assert [len(event.stored) for event in log.take(INFO)] == [10_000, 10_000, 5_000]


def test_an_inventory_page_begins_at_its_block_number_and_names_the_next() -> None:
    hashes = BlockHashes(30_000)
    for block in range(0, 30_000, 2):
        hashes.store(block, BlockHash(block.to_bytes(32, "big")))
    first, after = hashes.page(0)
    second, end = hashes.page(after)
    assert (len(first), len(second), end) == (10_000, 5_000, 0)
    assert [row.block for row in first + second] == list(range(0, 30_000, 2))
    assert hashes.page(10**9) == ([], 0)
    assert hashes.page(-1) == ([], 0)
