"""Seeded runs of the whole mesh under random faults (design §11).

`HORTATOR_SIM_SEED=n pytest tests/sim` replays one seed, with the books checked after every event.
"""

import os

import pytest
from sim_nemesis import run_seed

CHUNK = 25
FAST = range(0, 300, CHUNK)
SLOW = range(1000, 3000, 100)

replay = os.environ.get("HORTATOR_SIM_SEED")


@pytest.mark.skipif(replay is not None, reason="one seed is replayed")
@pytest.mark.parametrize("first", FAST)
def test_every_property_holds_under_random_faults(first: int):
    for seed in range(first, first + CHUNK):
        # A look into the books after each event costs as much as the run itself.
        run_seed(seed, careful=seed % CHUNK == 0)


@pytest.mark.slow
@pytest.mark.skipif(replay is not None, reason="one seed is replayed")
@pytest.mark.parametrize("first", SLOW)
def test_every_property_holds_under_thousands_of_plans(first: int):
    for seed in range(first, first + 100):
        run_seed(seed, careful=seed % 10 == 0)


@pytest.mark.skipif(replay is None, reason="HORTATOR_SIM_SEED is not set")
def test_the_seed_from_the_environment():
    run_seed(int(replay or 0), careful=True)
