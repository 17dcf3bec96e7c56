"""Bringing the beginning of a waiting sequence from the second tier."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_rig import BLOCK, FakeInstance, Rig

from services.scheduler.core import Rules
from services.scheduler.events import Hint, LookUp
from services.scheduler.fetching import FetchRules, common_beginning
from services.scheduler.fleet import FleetRules
from services.scheduler.instances import State
from shared.blocks import chain, root_hash
from shared.wire import Beat, Fetch, Fetched

TIER = "tier-k0-abc"
PROMPT = list(range(300, 400))
FULL = len(PROMPT) // BLOCK


def rig(*instances: FakeInstance, tier: str = TIER, **rules: Any) -> Rig:
    """A token costs 1 ms here, a block from the tier a tenth of its four."""
    made = instances or (instance("w0", tier),)
    fetch = FetchRules(**rules)
    return Rig(*made, rules=Rules("m", fleet=FleetRules(stall_s=1e9), fetch=fetch)).ready()


def instance(name: str, tier: str = TIER, **fields: Any) -> FakeInstance:
    rates = {"prefill_tok_s": 1e3, "tier": tier, "tier_fixed_s": 0.001, "tier_block_s": 0.0004}
    return FakeInstance(name, **(rates | fields))


def lookups(of: Rig) -> list[LookUp]:
    return [effect for effect in of.effects if isinstance(effect, LookUp)]


def hint(of: Rig, blocks: int, tier: str = TIER) -> None:
    """Answer the last lookup."""
    asked = lookups(of)[-1]
    of.handle(Hint(asked.client, asked.handles, {tier: blocks}))
    of.turn()


def fetches(of: Rig, name: str = "w0") -> list[Fetch]:
    return [fetch for frame in of.instances[name].seen for fetch in frame.fetch]


def admitted(of: Rig, name: str = "w0") -> list[int]:
    """`computed` of every admission."""
    return [admit.computed for frame in of.instances[name].seen for admit in frame.admit]


def end(of: Rig, op: int, count: int, name: str = "w0", told: bool = True) -> None:
    """The instance ends a fetch, and says so."""
    of.instances[name].compute.batch.fetched(op, count)
    if told:
        tell(of, op, count, name)


def tell(of: Rig, op: int, count: int, name: str = "w0", incarnation: int = 0) -> None:
    there = of.instances[name]
    epoch = of.core.leadership.epoch
    of.handle(
        Beat(info=there.info, incarnation=incarnation or there.incarnation, epoch=epoch, owner="me",
             seen_seq=0, done_seq=0, fetched=[Fetched(op, count)])
    )  # fmt: skip
    of.turn()


def held(of: Rig, name: str = "w0") -> int:
    pool = of.core.fleet.instances[name].pool
    return pool.size - pool.free


def begun(of: Rig, name: str = "a", blocks: int = FULL, **fields: Any) -> Fetch:
    """A request whose fetch is under way, its frame computed."""
    of.submit(name, PROMPT, 4, **fields)
    hint(of, blocks)
    (fetch,) = [f for each in of.instances for f in fetches(of, each)][-1:]
    of.run()
    return fetch


def test_what_the_tier_holds_is_fetched_and_then_an_ordinary_prefix_hit():
    mesh = rig()
    fetch = begun(mesh)
    assert (fetch.tier, len(fetch.blocks), len(fetch.hashes)) == (TIER, FULL, FULL)
    assert fetch.hashes == lookups(mesh)[0].hashes
    assert not admitted(mesh)
    assert held(mesh) == FULL
    end(mesh, fetch.op, FULL)
    mesh.run()
    assert admitted(mesh) == [len(PROMPT) - 1]
    ended = mesh.end("a")
    assert ended is not None
    assert (ended.reason, ended.cached_tokens) == ("length", len(PROMPT) - 1)
    assert ended.times.transfer_s > 0
    assert mesh.tokens("a") == [100, 101, 102, 103]
    assert mesh.at_rest()


@pytest.mark.parametrize("came", [0, 1, 7])
def test_what_did_not_come_is_computed_and_not_asked_for_again(came: int):
    mesh = rig()
    fetch = begun(mesh)
    end(mesh, fetch.op, came)
    mesh.run()
    assert admitted(mesh) == [came * BLOCK]
    assert len(fetches(mesh)) == 1
    assert mesh.tokens("a") == [100, 101, 102, 103]
    assert mesh.core.counters.fetches_short == 1
    assert mesh.at_rest()


def test_only_what_the_instance_does_not_hold_is_fetched():
    mesh = rig()
    mesh.submit("first", PROMPT[:40], 4)
    hint(mesh, 0)
    mesh.run()
    fetch = begun(mesh)
    assert len(fetch.blocks) == FULL - 10
    assert held(mesh) == FULL
    end(mesh, fetch.op, FULL - 10)
    mesh.run()
    assert admitted(mesh)[-1] == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("tier", "blocks", "fields"),
    [
        (TIER, 1, {}),
        (TIER, FULL, {"tier_block_s": 0.004}),
        (TIER, FULL, {"tier_fixed_s": 0.1}),
        (TIER, FULL, {"tier_fixed_s": 0.0, "tier_block_s": 0.0}),
        (TIER, FULL, {"tier_block_s": float("nan")}),
        ("tier-of-others", FULL, {}),
    ],
    ids=["too-little", "too-slow", "too-long-to-begin", "not-measured", "nonsense", "another-tier"],
)
def test_nothing_is_fetched_where_computing_is_as_good(tier: str, blocks: int, fields: dict[str, float]):
    mesh = rig(instance("w0", **fields))
    mesh.submit("a", PROMPT, 4)
    hint(mesh, blocks, tier)
    mesh.run()
    assert not fetches(mesh)
    assert admitted(mesh) == [0]


def test_a_sequence_is_held_back_for_its_hint_for_a_moment_only():
    mesh = rig()
    mesh.submit("a", PROMPT, 4)
    assert lookups(mesh)
    assert not mesh.w0.seen
    mesh.submit("b", 6, 4)
    assert admitted(mesh) == [0], "others pass"
    mesh.now += 0.005
    mesh.turn()
    mesh.run()
    assert admitted(mesh) == [0, 0]
    assert mesh.tokens("a") == [100, 101, 102, 103]


@pytest.mark.parametrize("tier", [TIER, ""])
def test_nobody_asks_where_the_answer_could_not_matter(tier: str):
    mesh = rig(tier=tier)
    mesh.submit("short", 12, 4)
    mesh.submit("logprobs", PROMPT, 4, sampling={"prompt_logprobs": 1})
    if not tier:
        mesh.submit("long", PROMPT, 4)
    assert not lookups(mesh)
    assert len(admitted(mesh)) >= 1


def test_others_pass_a_sequence_that_fetches_but_its_room_is_kept():
    mesh = rig(instance("w0", blocks_total=32, max_slots=2))
    fetch = begun(mesh)
    mesh.submit("small", 6, 4)
    mesh.run()
    assert mesh.tokens("small") == [100, 101, 102, 103]
    mesh.submit("large", list(range(500, 524)), 4)
    mesh.run()
    assert not mesh.tokens("large"), "six blocks are free, and the fetcher will need one more"
    end(mesh, fetch.op, FULL)
    mesh.run()
    assert mesh.tokens("large") == mesh.tokens("a") == [100, 101, 102, 103]
    assert mesh.at_rest()


def test_its_slot_is_kept_too():
    mesh = rig(instance("w0", max_slots=1))
    fetch = begun(mesh)
    mesh.submit("b", 6, 4)
    mesh.run()
    assert not mesh.tokens("b")
    end(mesh, fetch.op, FULL)
    mesh.run()
    assert mesh.tokens("b") == [100, 101, 102, 103]


def test_a_fetch_that_takes_too_long_is_given_up_but_its_blocks_are_not_handed_out():
    mesh = rig()
    fetch = begun(mesh)
    mesh.pass_time(1.6)
    mesh.run()
    assert mesh.tokens("a") == [100, 101, 102, 103]
    assert held(mesh) == FULL
    mesh.submit("b", PROMPT, 4)
    hint(mesh, FULL)
    mesh.run()
    assert held(mesh) == FULL
    end(mesh, fetch.op, FULL)
    assert held(mesh) == 0


def test_a_cancelled_sequence_leaves_its_blocks_with_the_fetch_until_that_has_ended():
    mesh = rig()
    fetch = begun(mesh)
    sequence = mesh.core.desk.clients["c"].sequences[mesh.handle_of("a")]
    mesh.core.desk.end(sequence, "cancelled", "", mesh.now)
    mesh.turn()
    assert held(mesh) == FULL
    end(mesh, fetch.op, FULL)
    assert mesh.at_rest()
    mesh.submit("b", PROMPT, 4)
    mesh.run()
    assert admitted(mesh) == [len(PROMPT) - 1], "what came can be shared all the same"


def test_the_end_of_a_fetch_counts_once_however_often_it_is_told():
    mesh = rig()
    fetch = begun(mesh)
    end(mesh, fetch.op, FULL)
    for _ in range(3):
        tell(mesh, fetch.op, 0)
    mesh.run()
    assert mesh.core.counters.fetches == 1
    assert admitted(mesh) == [len(PROMPT) - 1]


def test_the_end_of_a_fetch_of_a_former_session_is_none_of_this_one():
    mesh = rig()
    fetch = begun(mesh)
    former = mesh.w0.incarnation
    mesh.core.fleet.lose(mesh.core.fleet.instances["w0"], "a test", mesh.now)
    mesh.pass_time(1.0)
    for _ in range(10):
        mesh.step()
    hint(mesh, FULL)
    mesh.run()
    again = fetches(mesh)[-1]
    assert again is not fetch
    tell(mesh, again.op, FULL, incarnation=former)
    assert held(mesh) == FULL
    assert not admitted(mesh)[1:]
    end(mesh, again.op, FULL)
    mesh.run()
    assert mesh.tokens("a") == [100, 101, 102, 103]


def test_a_sequence_whose_instance_is_lost_fetches_on_another():
    mesh = rig(instance("w0"), instance("w1"))
    begun(mesh)
    home = next(name for name in mesh.instances if fetches(mesh, name))
    other = "w1" if home == "w0" else "w0"
    mesh.core.fleet.lose(mesh.core.fleet.instances[home], "a test", mesh.now)
    mesh.turn()
    (fetch,) = fetches(mesh, other)
    mesh.run()
    end(mesh, fetch.op, FULL, other)
    mesh.run()
    assert mesh.tokens("a") == [100, 101, 102, 103]


def test_what_waited_while_its_only_instance_restarted_is_looked_up_before_it_is_computed():
    mesh = rig()
    mesh.submit("first", PROMPT, 4)
    mesh.run()
    asked = len(lookups(mesh))
    mesh.submit("again", PROMPT, 4, turn=False)
    mesh.core.fleet.lose(mesh.core.fleet.instances["w0"], "a test", mesh.now)
    mesh.instances["w0"] = instance("w0", born=2)
    mesh.turn()
    while len(lookups(mesh)) == asked:
        mesh.pass_time(0.1)
        mesh.step()
    assert len(admitted(mesh)) == 1, "the canary alone"
    hint(mesh, FULL)
    assert [len(fetch.hashes) for fetch in fetches(mesh)] == [FULL]


def test_nobody_waits_for_a_fetch_of_an_instance_that_drains():
    mesh = rig(instance("w0"), instance("w1"))
    begun(mesh)
    home = next(name for name in mesh.instances if fetches(mesh, name))
    other = "w1" if home == "w0" else "w0"
    there = mesh.instances[home]
    there.info = msgspec.structs.replace(there.info, state="draining")
    mesh.beat(there)
    mesh.turn()
    (fetch,) = fetches(mesh, other)
    mesh.run()
    end(mesh, fetch.op, FULL, other)
    mesh.run()
    assert mesh.tokens("a") == [100, 101, 102, 103]
    end(mesh, fetches(mesh, home)[0].op, FULL, home)
    assert mesh.at_rest()


@given(
    a=st.lists(st.integers(0, 2), max_size=12),
    b=st.lists(st.integers(0, 2), max_size=12),
)
def test_the_common_beginning_of_two_chains_is_what_comparing_them_block_by_block_finds(
    a: list[int], b: list[int]
):
    chains = [chain(root_hash("f", 1, ""), ids, 1) for ids in (a, b)]
    same = next((n for n, (x, y) in enumerate(zip(*chains)) if x != y), min(len(a), len(b)))
    assert common_beginning(*chains) == same


def test_an_instance_that_never_tells_how_a_fetch_ended_is_claimed_anew():
    mesh = rig()
    begun(mesh)
    mesh.pass_time(29.0)
    assert mesh.core.fleet.instances["w0"].fetches
    mesh.pass_time(2.0)
    for _ in range(10):
        mesh.step()
    there = mesh.core.fleet.instances["w0"]
    assert there.state is State.READY
    assert not there.fetches


def test_a_burst_with_one_new_prefix_is_fetched_once():
    mesh = rig()
    for name in "abcd":
        mesh.submit(name, [*PROMPT, ord(name)], 4, turn=False)
    mesh.turn()
    for asked in lookups(mesh):
        mesh.handle(Hint(asked.client, asked.handles, {TIER: FULL}))
    mesh.turn()
    (fetch,) = fetches(mesh)
    mesh.run()
    assert not admitted(mesh)
    end(mesh, fetch.op, FULL)
    mesh.run()
    assert admitted(mesh) == [len(PROMPT)] * 4


def test_a_burst_with_one_new_prefix_computes_it_once():
    mesh = rig(tier="")
    for name in "abcd":
        mesh.submit(name, [*PROMPT, ord(name)], 4, turn=False)
    mesh.turn()
    mesh.run()
    assert sorted(admitted(mesh)) == [0] + [len(PROMPT)] * 3


def test_a_more_urgent_request_waits_for_nobody_less_urgent_to_compute_its_prefix():
    mesh = rig(instance("w0", "", max_step_tokens=24))
    mesh.submit("a", [*PROMPT, 1], 4, priority=1)
    mesh.submit("b", [*PROMPT, 2], 4, priority=0)
    mesh.step()
    assert len(admitted(mesh)) == 2
    mesh.run()
    assert mesh.tokens("a") == mesh.tokens("b") == [100, 101, 102, 103]


def test_a_preempted_sequence_needs_no_lookup_to_find_what_it_left_in_the_tier():
    mesh = rig(lookup_worth=1e9)
    mesh.submit("a", PROMPT, 40)
    for _ in range(12):
        mesh.step()
    there = mesh.core.fleet.instances["w0"]
    sequence = next(iter(there.running))
    written = len(sequence.out)
    assert written
    there.leave(sequence)
    mesh.core.desk.requeue(sequence, mesh.now)
    full = (len(PROMPT) + written) // BLOCK
    sequence.offloaded = (TIER, full)
    # What it left here is handed out to others meanwhile.
    while mesh.w0.frames:
        mesh.handle(mesh.w0.result())
    taken = there.pool.take(there.pool.free)
    assert taken is not None
    there.pool.release(taken)
    mesh.turn()
    (fetch,) = fetches(mesh)
    assert len(fetch.blocks) == full
    mesh.run()
    end(mesh, fetch.op, full)
    mesh.run()
    assert mesh.tokens("a") == list(range(100, 140))


def test_lookups_of_a_resumed_sequence_cover_its_output():
    mesh = rig()
    mesh.submit("a", PROMPT, 40, accepted=list(range(100, 120)))
    (asked,) = lookups(mesh)
    assert len(asked.hashes) == (len(PROMPT) + 20) // BLOCK


def test_choices_of_one_request_are_looked_up_once():
    mesh = rig()
    mesh.submit("a", PROMPT, 4, n=3)
    (asked,) = lookups(mesh)
    assert len(asked.handles) == 3


def test_rates_that_change_change_the_decision():
    mesh = rig()
    slow = msgspec.structs.replace(mesh.w0.info, tier_block_s=1.0)
    mesh.w0.info = slow
    mesh.beat(mesh.w0)
    mesh.submit("a", PROMPT, 4)
    hint(mesh, FULL)
    assert not fetches(mesh)
    assert admitted(mesh) == [0]
