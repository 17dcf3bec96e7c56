"""The block size by cost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory.block_size import CANDIDATES, GRANULE, choose_block_tokens

token_bytes = st.integers(1, 1 << 20).map(lambda n: n * 64)


@given(token_bytes, st.sampled_from([64, 128, 256, 512]), st.integers(64, 1 << 20))
def test_the_chosen_size_costs_least_of_those_that_are_moved_whole(token, run, max_len):
    choice = choose_block_tokens(token, run, max_len)
    whole = [c for c in choice.table if c.block_tokens * token % GRANULE == 0] or list(choice.table)
    assert choice.chosen.cost == min(c.cost for c in whole)
    assert [c.block_tokens for c in choice.table] == list(CANDIDATES)


@given(token_bytes, st.integers(64, 1 << 20))
def test_large_blocks_lose_more_memory_and_make_less_work_than_small_ones(token, max_len):
    table = choose_block_tokens(token, 128, max_len).table
    for small, large in pairwise(table):
        assert large.lost_share > small.lost_share
        assert large.work_share < small.work_share
        assert large.table_entries <= small.table_entries


@given(token_bytes, st.integers(1, 20))
def test_the_more_bytes_a_token_has_the_smaller_are_the_blocks(token, times):
    small = choose_block_tokens(token, 128, 8192).chosen.block_tokens
    assert choose_block_tokens(token * times, 128, 8192).chosen.block_tokens <= small


def test_what_is_asked_for_is_taken_and_its_cost_shown_all_the_same():
    choice = choose_block_tokens(23040, 128, 8192, asked=24)
    assert (choice.chosen.block_tokens, choice.asked) == (24, True)
    assert "24 tokens, 552,960 bytes as asked" in choice.describe()


def test_the_line_for_people_names_both_costs_and_the_length_of_tables():
    text = choose_block_tokens(23040, 128, 8192).describe()
    for part in ("lost at block ends", "more work for each block", "tables of up to"):
        assert part in text


def test_a_block_is_a_multiple_of_what_is_moved_at_once_where_that_is_possible():
    # 16 and less of such tokens are no multiple of a page.
    assert choose_block_tokens(GRANULE // 32, 4096, 1 << 20).chosen.block_tokens >= 32
    assert choose_block_tokens(100, 128, 8192).chosen in choose_block_tokens(100, 128, 8192).table


@pytest.mark.parametrize("bad", [{"token_bytes": 0}, {"run_bytes": 0}, {"max_len": 0}, {"asked": -1}])
def test_sizes_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match="KV of"):
        choose_block_tokens(**({"token_bytes": 64, "run_bytes": 64, "max_len": 64} | bad))
