from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.blocks import BlockPool
from shared.ids import BlockHash


def named(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def filled(pool: BlockPool, count: int, first: int = 0) -> list[int]:
    """Blocks with one holder, full and named first, first + 1, …"""
    blocks = pool.take(count)
    assert blocks is not None
    for offset, block in enumerate(blocks):
        pool.confirm(block, named(first + offset))
    return blocks


def test_a_block_stays_out_of_the_free_list_until_its_last_holder_releases():
    pool = BlockPool(4)
    first = filled(pool, 2)
    pool.share(first[:1])
    pool.release(first)
    assert pool.free == 3
    pool.release(first[:1])
    assert pool.free == 4
    pool.check()


def test_more_blocks_than_are_free_are_not_handed_out_at_all():
    pool = BlockPool(3)
    assert pool.take(4) is None
    assert pool.free == 3


def test_a_freed_block_is_found_again_until_it_is_handed_out():
    pool = BlockPool(3)
    blocks = filled(pool, 3)
    pool.release(blocks)
    assert pool.find([named(0), named(1), named(2)]) == blocks
    taken = pool.take(1)
    assert taken == blocks[2:], "the tail goes first"
    assert pool.find([named(0), named(1), named(2)]) == blocks[:2]
    pool.check()


def test_blocks_without_content_go_before_cached_ones():
    pool = BlockPool(4)
    cached = filled(pool, 2)
    plain = pool.take(2)
    assert plain is not None
    pool.release(cached)
    pool.release(plain)
    assert set(pool.take(2) or ()) == set(plain)


def test_the_least_recently_freed_prefix_is_evicted_first():
    pool = BlockPool(4)
    old, new = filled(pool, 2), filled(pool, 2, first=10)
    pool.release(old)
    pool.release(new)
    pool.share(pool.find([named(0), named(1)]))
    pool.release(old)
    pool.take(2)
    assert pool.find([named(0), named(1)]) == old
    assert pool.find([named(10)]) == []


def test_a_prefix_ends_at_its_first_missing_block():
    pool = BlockPool(4)
    blocks = filled(pool, 3)
    assert pool.find([named(0), named(9), named(2)]) == blocks[:1]


def test_equal_content_in_two_blocks_is_found_once_and_both_can_be_freed():
    pool = BlockPool(4)
    first, second = filled(pool, 1), filled(pool, 1)
    assert pool.find([named(0)]) == first
    pool.release(first)
    pool.release(second)
    assert pool.free == 4
    pool.check()


def test_an_inventory_makes_free_blocks_that_can_be_found():
    pool = BlockPool(4, [(2, named(7)), (3, named(8)), (1, named(7))])
    assert pool.free == 4
    assert pool.find([named(7), named(8)]) == [2, 3]
    pool.check()


def test_a_double_release_is_an_error_with_the_block_in_it():
    pool = BlockPool(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(RuntimeError, match=f"block {blocks[0]} was released"):
        pool.release(blocks)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "release", "confirm"]), st.integers(0, 9)), max_size=60
    )
)
def test_the_pool_agrees_with_a_plain_account_of_holders_and_names(moves: list[tuple[str, int]]):
    """The oracle keeps a counter of holders and a dict of names, and knows nothing of orders."""
    pool = BlockPool(6)
    held: list[list[int]] = []
    holders: Counter[int] = Counter()
    names: dict[int, int] = {}
    for move, number in moves:
        if move == "take":
            blocks = pool.take(number % 4)
            free = sum(1 for block in range(6) if not holders[block])
            assert (blocks is None) == (number % 4 > free)
            for block in blocks or ():
                assert not holders[block]
                names.pop(block, None)
            if blocks:
                holders.update(blocks)
                held.append(blocks)
        elif move == "share":
            found = pool.find([named(number)])
            assert found == [block for block, name in names.items() if name == number]
            if found:
                pool.share(found)
                holders.update(found)
                held.append(found)
        elif move == "release" and held:
            blocks = held.pop(number % len(held))
            pool.release(blocks)
            holders.subtract(blocks)
        elif move == "confirm" and held:
            block = held[number % len(held)][0]
            if block not in names:
                pool.confirm(block, named(number))
                if number not in names.values():
                    names[block] = number
        pool.check()
        assert pool.free == sum(1 for block in range(6) if not holders[block])
        assert pool.cached == len(names)
