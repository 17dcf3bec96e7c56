"""What the system says of this process's memory, against memory whose size is known."""

import mmap
import threading
import time

import numpy as np
import pytest
import torch

from services.worker.engine import resident as accounts
from services.worker.engine.memory import Arena
from services.worker.engine.resident import Peak, resident, room_here

MIB = 1 << 20


def test_an_arena_has_no_pages_until_they_are_written_and_all_once_it_is_populated():
    arena = Arena(64 * MIB)
    assert arena.resident_bytes <= 2 * MIB
    arena.take(4 * MIB, torch.uint8).fill_(1)
    assert 4 * MIB <= arena.resident_bytes <= 8 * MIB
    before = resident().private
    arena.populate()
    assert arena.resident_bytes == 64 * MIB
    assert resident().private - before >= 50 * MIB


def test_populating_leaves_what_is_written_alone():
    arena = Arena(4 * MIB)
    values = arena.take(1000, torch.float32)
    values.copy_(torch.arange(1000))
    arena.populate()
    assert torch.equal(values, torch.arange(1000, dtype=torch.float32))


def test_a_peak_counts_memory_that_is_gone_again():
    peak = Peak()
    memory = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(memory, np.uint8)[:] = 1
    memory.close()
    assert 40 * MIB <= peak.grown() <= 64 * MIB


def test_where_no_peak_is_kept_what_is_resident_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(Peak, "_CLEAR", tmp_path / "missing" / "clear_refs")
    peak = Peak()
    memory = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(memory, np.uint8)[:] = 1
    assert 40 * MIB <= peak.grown() <= 64 * MIB


def test_the_room_here_is_no_more_than_the_machine_has():
    room = room_here()
    assert 0 < room.bytes < 1 << 60
    assert room.origin


@pytest.mark.parametrize(
    ("limit", "left"), [("max", None), (str(100 * MIB), 100 - 30 + 10), (str(20 * MIB), 0)]
)
def test_a_control_group_leaves_its_limit_less_what_is_used_and_cannot_be_dropped(tmp_path, limit, left):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(str(30 * MIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {10 * MIB}\n")
    found = accounts.left_in(tmp_path, "memory.max", "memory.current", "inactive_file")
    assert found == (None if left is None else left * MIB)


def test_a_control_group_that_cannot_be_read_limits_nothing(tmp_path):
    assert accounts.left_in(tmp_path, "memory.max", "memory.current", "inactive_file") is None


def test_where_the_kernel_cannot_populate_pages_are_written_and_their_content_stays(monkeypatch):
    monkeypatch.setattr("services.worker.engine.memory._POPULATE_WRITE", 9999)
    arena = Arena(8 * MIB)
    values = arena.take(1000, torch.float32)
    values.copy_(torch.arange(1000))
    arena.populate()
    assert arena.resident_bytes == 8 * MIB
    assert torch.equal(values, torch.arange(1000, dtype=torch.float32))


def test_other_threads_go_on_while_memory_is_populated():
    arena, over = Arena(256 * MIB), threading.Event()
    thread = threading.Thread(target=lambda: (arena.populate(), over.set()))
    begun = time.perf_counter()
    thread.start()
    turns = 0
    while not over.is_set():
        turns += 1
    thread.join()
    assert turns > 100, f"{turns} turns in {time.perf_counter() - begun:.3f} s"
