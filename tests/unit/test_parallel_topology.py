"""Domains of well-linked devices in matrices of known machines, and groups placed in them."""

import json
import random
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.parallel.topology import Links, Partition, domains, levels, place, rate, straddle

FOLDER = Path(__file__).parents[1] / "data" / "topologies"
ISLANDS = ((0, 1, 2, 3), (4, 5, 6, 7))
KNOWN: dict[str, Partition] = {
    "nvlink_8": (tuple(range(8)),),
    "nvlink_islands_4_4": ISLANDS,
    "two_nodes_8_8": (tuple(range(8)), tuple(range(8, 16))),
    "bridged_pairs_two_nodes": ISLANDS,
}


def links(name: str, noise: float = 0.0, seed: int = 0) -> Links:
    record = json.loads((FOLDER / f"{name}.json").read_text())
    rng = random.Random(seed)

    def scaled(rows: list[list[float]], unit: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(x * unit * rng.uniform(1 - noise, 1 + noise) for x in row) for row in rows)

    return Links(scaled(record["gigabytes_per_s"], 1e9), scaled(record["latency_us"], 1e-6))


def uniform(size: int, bandwidth: float = 1e9) -> Links:
    row = (bandwidth,) * size
    return Links((row,) * size, ((1e-6,) * size,) * size)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_domains_of_known_machines_are_found_despite_noise(name: str, noise: float) -> None:
    for seed in range(10):
        assert domains(links(name, noise, seed)) == KNOWN[name], (name, noise, seed)


def test_pairs_within_nodes_are_domains_within_domains() -> None:
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert levels(links("bridged_pairs_two_nodes")) == (pairs, ISLANDS, (tuple(range(8)),))
    assert levels(links("nvlink_8")) == ((tuple(range(8)),),)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.floats(1e6, 1e12), st.permutations(range(8)))
def test_what_is_a_domain_depends_on_no_unit_and_no_numbering(
    size: int, unit: float, order: list[int]
) -> None:
    known = links("nvlink_islands_4_4")
    mixed = tuple(tuple(known.bytes_per_s[a][b] / 1e9 * unit for b in order) for a in order)
    found = domains(Links(mixed, known.latency_s))
    assert {frozenset(order[at] for at in domain) for domain in found} == set(map(frozenset, ISLANDS))
    assert domains(uniform(size, unit)) == (tuple(range(size)),)


def test_one_slow_direction_makes_a_slow_link() -> None:
    fast, slow = 100e9, 5e9
    rows = ((0, fast, fast), (fast, 0, fast), (slow, slow, 0))
    assert domains(Links(rows, ((0.0,) * 3,) * 3)) == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("name", "size", "groups", "expected"),
    [
        ("nvlink_islands_4_4", 4, 2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("nvlink_islands_4_4", 3, 2, ((0, 1, 2), (4, 5, 6))),
        ("two_nodes_8_8", 8, 2, (tuple(range(8)), tuple(range(8, 16)))),
        ("bridged_pairs_two_nodes", 2, 4, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("bridged_pairs_two_nodes", 3, 2, ((0, 1, 2), (4, 5, 6))),
    ],
)
def test_groups_stay_inside_domains_where_they_fit(
    name: str, size: int, groups: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert place(links(name), size, groups) == expected


def test_a_group_that_must_straddle_has_those_of_a_domain_side_by_side() -> None:
    (group,) = place(links("bridged_pairs_two_nodes"), 6)
    nodes, pairs = [at // 4 for at in group], [at // 2 for at in group]
    assert nodes in ([0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0])
    assert all(len({at for at, it in enumerate(pairs) if it == pair}) == 2 for pair in set(pairs))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.integers(1, 8), st.integers(1, 8), st.integers(0, 50))
def test_as_few_groups_straddle_as_can_be(name: str, size: int, groups: int, seed: int) -> None:
    known = links(name, 0.05, seed)
    if size * groups > known.size:
        with pytest.raises(ValueError, match="devices"):
            place(known, size, groups)
        return
    placed = place(known, size, groups)
    assert [len(group) for group in placed] == [size] * groups
    assert len({at for group in placed for at in group}) == size * groups
    inside = sum(any(set(group) <= set(domain) for domain in KNOWN[name]) for group in placed)
    assert inside == min(groups, sum(len(domain) // size for domain in KNOWN[name]))


def test_no_other_placement_has_a_better_worst_link() -> None:
    known = links("bridged_pairs_two_nodes")

    def worst(group: tuple[int, ...]) -> float:
        return min(known.bandwidth(a, b) for a, b in combinations(group, 2))

    for size in range(2, 8):
        (group,) = place(known, size)
        best = max(worst(other) for other in combinations(range(8), size))
        assert worst(group) > best / 1.2  # of the same kind


def test_a_straddling_group_is_told_with_figures_and_what_to_do() -> None:
    known = links("nvlink_islands_4_4")
    found = straddle((0, 1, 2, 3, 4), known)
    assert found is not None
    assert found.parts == ((0, 1, 2, 3), (4,))
    assert found.ratio == pytest.approx(280 / 24, rel=0.1)
    assert "ranks 0-3 are linked at 27" in found.describe()
    assert "ranks 0 and 4 at 23 GB/s (9 µs): 12.0× slower" in found.describe()
    assert found.describe().endswith("--tp 4 or less fits into one domain")
    badly = straddle((1, 5), known)
    assert badly is not None
    assert badly.describe().endswith("a domain of 4 devices would hold all 2 ranks")
    assert "devices of one domain are linked at 27" in badly.describe()


@pytest.mark.parametrize("group", [(0, 1, 2, 3), (4, 6), (7,)])
def test_a_group_inside_a_domain_is_no_reason_to_warn(group: tuple[int, ...]) -> None:
    assert straddle(group, links("nvlink_islands_4_4")) is None


def test_a_group_across_bridged_pairs_of_one_node_straddles_pairs_not_nodes() -> None:
    known = links("bridged_pairs_two_nodes")
    within, across = straddle((0, 2), known), straddle((0, 4), known)
    assert within is not None
    assert across is not None
    assert within.fitting == 2
    assert across.fitting == 4
    assert straddle((0, 1), known) is None


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)))
def test_what_straddles_does_not_depend_on_the_order_of_ranks(group: list[int]) -> None:
    found = straddle(group, links("nvlink_islands_4_4"))
    assert found is not None
    assert {frozenset(group[rank] for rank in part) for part in found.parts} == {
        frozenset({0, 1, 2, 3}),
        frozenset({4}),
    }


def test_matrices_that_are_none_are_refused() -> None:
    for rows in ((), ((0.0, 1.0),), ((0.0, 1.0), (1.0,))):
        with pytest.raises(ValueError, match="rows"):
            Links(rows, rows)
    with pytest.raises(ValueError, match="devices 0 and 1 have no bandwidth"):
        Links(((0.0, 1.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)))


def test_bandwidths_are_told_in_their_units() -> None:
    assert [rate(value) for value in (280e9, 24.04e9, 31.25e6, 12e3)] == [
        "280 GB/s",
        "24 GB/s",
        "31.2 MB/s",
        "12 kB/s",
    ]


def test_small_machines_have_one_domain() -> None:
    for order in permutations((1e9, 1.5e9, 1.9e9)):
        ab, ac, bc = order
        rows = ((0, ab, ac), (ab, 0, bc), (ac, bc, 0))
        assert domains(Links(rows, ((0.0,) * 3,) * 3)) == ((0, 1, 2),)
    assert domains(uniform(1)) == ((0,),)
    assert place(uniform(1), 1) == ((0,),)
