"""Rates, homes, ends and arrivals: the second tier's small decisions, each by itself."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.executors import make_runner
from services.worker.settings import WorkerSettings
from services.worker.tier.arrivals import Arrivals
from services.worker.tier.endings import LIMIT_S, Endings
from services.worker.tier.homes import SILENT_S, Homes, TierState
from services.worker.tier.rates import FetchRates, PrefillRate, pays
from services.worker.tier.staging import Staging
from shared.runtime.settings import SettingsError
from shared.subjects import tier_row
from shared.wire import Fetch, Fetched, TierOffer


def offer(name: str = "kv0", host: str = "far", born: int = 1, port: int = 1) -> TierOffer:
    return TierOffer(instance=name, host=host, port=port, secret="s", born=born, memory_bytes=1, disk_bytes=0)


def row(name: str) -> str:
    return tier_row(name, "m")


class TestRates:
    @given(fixed=st.floats(0, 0.1), block=st.floats(1e-5, 0.1), seed=st.integers(0, 1000))
    def test_fetches_of_several_sizes_tell_what_is_fixed_and_what_a_block_takes(
        self, fixed: float, block: float, seed: int
    ) -> None:
        rates, rng = FetchRates(), random.Random(seed)
        for _ in range(20):
            blocks = rng.randint(1, 100)
            rates.observe(blocks, fixed + blocks * block)
        assert rates.fit() == pytest.approx((fixed, block), rel=0.02, abs=1e-4)

    def test_the_latest_fetches_count_most(self) -> None:
        rates = FetchRates()
        for _ in range(50):
            for blocks in (1, 10):
                rates.observe(blocks, 0.001 * blocks)
        for _ in range(30):
            for blocks in (1, 10):
                rates.observe(blocks, 0.01 * blocks)
        assert rates.fit()[1] == pytest.approx(0.01, rel=0.05)

    def test_fetches_of_one_size_count_by_block_alone(self) -> None:
        rates = FetchRates()
        for _ in range(5):
            rates.observe(10, 0.1)
        assert rates.fit() == pytest.approx((0.0, 0.01))

    @given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), max_size=30))
    def test_no_time_is_ever_negative(self, seen: list[tuple[int, float]]) -> None:
        rates = FetchRates()
        for blocks, seconds in seen:
            rates.observe(blocks, seconds)
        assert min(rates.fit()) >= 0

    def test_only_chunks_of_some_length_say_what_a_prompts_token_takes(self) -> None:
        prefill = PrefillRate(1000)
        prefill.observe(3, 1.0)
        assert prefill.token_s == 0.001
        for _ in range(100):
            prefill.observe(100, 0.2)
        assert prefill.token_s == pytest.approx(0.002, rel=0.01)

    def test_a_tier_pays_if_a_chain_of_some_length_is_had_sooner_than_computed(self) -> None:
        assert pays(0.01, 0.01, 16, 0.001)
        assert not pays(0.01, 0.015, 16, 0.001)
        assert not pays(0.2, 0.0, 16, 0.001)
        assert not pays(0.0, 0.0, 16, 0.0), "nothing is known of computing"


class TestHomes:
    def test_a_tier_on_this_host_is_nearest_then_the_quickest_then_the_first_by_name(self) -> None:
        homes = Homes("m")
        near, far, here = offer("b"), offer("c"), offer("d", host="127.0.0.1")
        homes.hear(offer("a"), 0.0)
        assert homes.unmeasured() == [], "there is nothing to choose"
        homes.hear(near, 0.0)
        homes.hear(far, 0.0)
        assert homes.home() == min(row("a"), row("b"), row("c"))
        homes.measured(near, 0.001)
        homes.measured(far, 0.002)
        assert homes.unmeasured() == [offer("a")]
        assert homes.home() == row("b")
        homes.hear(here, 0.0)
        assert homes.home() == row("d")

    def test_who_falls_silent_is_forgotten(self) -> None:
        homes = Homes("m")
        assert homes.hear(offer(), 0.0)
        assert not homes.hear(offer(), 1.0)
        assert not homes.expire(1.0 + SILENT_S)
        assert homes.expire(1.1 + SILENT_S)
        assert homes.home() == ""
        assert homes.offers() == ()

    def test_a_new_life_replaces_the_former_and_is_not_replaced_by_it(self) -> None:
        homes = Homes("m")
        homes.hear(offer(born=1), 0.0)
        assert homes.hear(offer(born=2, port=7), 0.0)
        assert not homes.hear(offer(born=1), 0.0)
        assert [each.port for each in homes.offers()] == [7]

    def test_a_state_finds_offers_by_their_row(self) -> None:
        state = TierState((offer("a"), offer("b")), row("b"))
        assert state.of(row("b"), "m") == offer("b")
        assert state.of(row("b"), "another model") is None


class TestEndings:
    def test_a_fetch_has_what_every_rank_has_once_all_have_said(self) -> None:
        endings = Endings(3)
        endings.begin((1, 7), 0.0)
        assert endings.said(0, (1, 7), 5, 100) is None
        assert endings.said(2, (1, 7), 3, 300) is None
        assert endings.said(2, (1, 7), 3, 300) is None, "one rank twice is one rank"
        assert endings.said(1, (1, 7), 4, 200) == Fetched(7, 3, 300)
        assert endings.said(1, (1, 7), 4, 200) is None, "it has ended already"

    def test_a_rank_that_says_nothing_ends_it_with_nothing(self) -> None:
        endings = Endings(2)
        endings.begin((1, 7), 0.0)
        endings.begin((1, 8), 5.0)
        endings.said(0, (1, 7), 5, 100)
        [(key, fetched)] = endings.expire(LIMIT_S + 0.1)
        assert key == (1, 7)
        assert (fetched.op, fetched.count) == (7, 0)
        assert endings.said(1, (1, 7), 5, 100) is None

    def test_after_the_session_nothing_ends(self) -> None:
        endings = Endings(1)
        endings.begin((1, 7), 0.0)
        endings.forget()
        assert endings.said(0, (1, 7), 5, 100) is None
        assert endings.expire(100.0) == []


class TestArrivals:
    def test_fetches_are_carried_out_in_order_and_those_that_are_over_are_not(self) -> None:
        arrivals = Arrivals()
        for op in (1, 2, 3):
            arrivals.begin(9, Fetch(op, "t", [op], [bytes(32)]), 0.0)
        first = arrivals.take()
        assert first is not None
        assert first.key == (9, 1)
        arrivals.end((9, 1))
        arrivals.end((9, 2))
        third = arrivals.take()
        assert first.over
        assert third is not None
        assert (third.key, third.over) == ((9, 3), False)
        arrivals.end_all()
        assert third.over
        assert arrivals.take() is None

    def test_an_op_of_a_former_session_is_another(self) -> None:
        arrivals = Arrivals()
        arrivals.begin(9, Fetch(1, "t", [1], [bytes(32)]), 0.0)
        arrivals.end((8, 1))
        taken = arrivals.take()
        assert taken is not None
        assert not taken.over


def test_staging_too_small_for_three_blocks_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ValueError, match="set it to 3000 or more, or to 0"):
        Staging(2999, 1000)
    assert Staging(3000, 1000).places == 1


def test_an_instance_cannot_be_called_as_a_tier() -> None:
    with pytest.raises(SettingsError, match="HORTATOR_INSTANCE=tier-1"):
        make_runner(WorkerSettings(mock=True, instance="tier-1"))
