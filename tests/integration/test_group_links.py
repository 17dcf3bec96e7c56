"""Links between ranks, measured on networks of namespaces with limited bandwidth."""

import json
import subprocess
import sys

import pytest

from services.worker.parallel.topology import Links, domains, place, straddle
from tests.support.netns import islands, unavailable

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]


def links_of(sizes: list[int], inside: str, between: str | None) -> Links:
    with islands(sizes, inside, between) as spaces:
        addresses = ",".join(space.address for space in spaces)
        ranks = [
            subprocess.Popen(
                space.command(
                    *(sys.executable, "-m", "tests.support.links_rank", str(rank), addresses, "29500")
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, space in enumerate(spaces)
        ]
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    speeds, latencies = json.loads(said[0])
    return Links(tuple(map(tuple, speeds)), tuple(map(tuple, latencies)))


def test_two_islands_are_found_and_a_group_across_them_is_told_what_it_costs() -> None:
    links = links_of([2, 2], "1gbit", "100mbit")
    assert domains(links) == ((0, 1), (2, 3))
    assert place(links, 2, 2) == ((0, 1), (2, 3))
    across = straddle((0, 1, 2, 3), links)
    assert across is not None
    assert across.fitting == 2
    assert 60e6 / 8 < across.across_bytes_per_s < 110e6 / 8
    assert "--tp 2 or less" in across.describe()


def test_ranks_on_equal_links_are_one_domain() -> None:
    links = links_of([3], "500mbit", None)
    assert domains(links) == ((0, 1, 2),)
    assert straddle((0, 1, 2), links) is None
