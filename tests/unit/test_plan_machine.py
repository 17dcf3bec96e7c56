"""This machine as a device: rates measured undisturbed are remembered, others are called assumed."""

from pathlib import Path

import pytest

from deploy import plan_machine
from services.worker.engine.resident import room_here


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))


def peaks(undisturbed: float) -> dict[str, float]:
    return {"read_gb_s": 20.0, "matmul_gf_s": 60.0, "undisturbed": undisturbed}


def test_rates_that_nobody_measured_are_called_assumed() -> None:
    machine = plan_machine.this_machine()
    assert "assumed" in machine.source
    assert "--device measured" in machine.source
    assert machine.read_b_s > 0
    assert machine.flop_s > 0


def test_measured_rates_serve_later_plans() -> None:
    assert plan_machine.remember(peaks(undisturbed=0.99))
    machine = plan_machine.this_machine()
    assert (machine.read_b_s, machine.flop_s) == (20e9, 60e9)
    assert "measured here earlier" in machine.source


def test_what_was_measured_while_others_computed_is_not_remembered() -> None:
    assert not plan_machine.remember(peaks(undisturbed=0.5))
    assert "assumed" in plan_machine.this_machine().source


def test_memory_is_what_may_still_be_taken() -> None:
    assert plan_machine.this_machine().memory_bytes == pytest.approx(room_here().bytes, rel=0.2)
