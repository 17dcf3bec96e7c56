"""Forming a group of devices, with gloo in NCCL's place and no device: what is agreed, refused and told."""

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from services.worker.collective.port import GroupLost  # noqa: E402
from services.worker.collective.tensors import Way  # noqa: E402
from services.worker.collective.torch_dist import TorchDistCollective  # noqa: E402
from services.worker.engine.cuda import group as group_module  # noqa: E402
from services.worker.engine.cuda.group import DeviceGroup, why_not_symmetric  # noqa: E402
from tests.support.thread_group import ThreadRank, on_ranks  # noqa: E402

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Gloo:
    """In place of `Nccl`."""

    def __init__(self, store: Any, rank: int, size: int, device: Any) -> None:
        self.end = TorchDistCollective(store, rank, size, host="127.0.0.1")
        self.name = "group"
        self.aborted = False

    def sum(self, part: Any) -> Any:
        self.end.all_reduce(part.numpy())
        return part

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(group_module, "Nccl", Gloo)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27), raising=False)


def formed(end: ThreadRank) -> DeviceGroup:
    # Indices tell the devices apart; that of a CPU is allowed and leads to the same memory.
    return DeviceGroup(end, torch.device("cpu", end.rank), 1 << 12)


def test_ranks_that_all_see_each_others_memory_use_it_for_what_it_is_faster_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        group_module, "symmetric_ways", lambda name, device, most: {"symmetric": Way(lambda part: part)}
    )
    groups = on_ranks(2, formed)
    assert [group.reducer.algorithms() for group in groups] == [("nccl", "symmetric")] * 2
    assert groups[0].table is not None
    assert groups[1].table is not None
    assert groups[0].table.entries == groups[1].table.entries
    assert groups[0].table.choose(1 << 10) == "symmetric"  # which does nothing here, and so is fastest
    assert groups[0].detail() == {"sums": "nccl, symmetric"}


def test_where_one_rank_cannot_share_its_memory_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(name: str, device: Any, most: int) -> dict[str, Way]:
        if device.index == 1:
            raise RuntimeError("CUDASymmetricMemory is not supported\nat line 5")
        return {"symmetric": Way(lambda part: part)}

    monkeypatch.setattr(group_module, "symmetric_ways", ways)
    groups = on_ranks(2, formed)
    assert [group.reducer.algorithms() for group in groups] == [("nccl",)] * 2
    assert groups[0].detail()["sums_reason"] == "some rank has no symmetric memory"
    assert groups[1].detail()["sums_reason"].endswith("CUDASymmetricMemory is not supported")
    part = [torch.ones(4) * rank for rank in range(2)]

    def add(end: ThreadRank) -> list[float]:
        return [float(x) for x in groups[end.rank].reducer.all_reduce(part[end.rank])]

    assert on_ranks(2, add) == [[1.0] * 4] * 2


def test_a_lost_group_ends_what_its_device_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "symmetric_ways", lambda name, device, most: {})

    formed_all = threading.Barrier(2)

    def work(end: ThreadRank) -> tuple[DeviceGroup, str]:
        group = formed(end)
        group.check()
        formed_all.wait(20)
        end.abort("rank 1 has ended")
        with pytest.raises(GroupLost, match="rank 1 has ended") as raised:
            group.check()
        return group, str(raised.value)

    for group, _ in on_ranks(2, work):
        assert isinstance(group._nccl, Gloo)
        assert group._nccl.aborted


def test_two_ranks_on_one_device_are_refused() -> None:
    def work(end: ThreadRank) -> None:
        with pytest.raises(ValueError, match="give each its own"):
            DeviceGroup(end, torch.device("cpu", 0), 1 << 12)

    on_ranks(2, work)


def test_why_there_is_no_symmetric_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_symmetric([("a", 0), ("a", 1)]) is None
    assert why_not_symmetric([("a", 0), ("b", 0)]) == "ranks are on 2 hosts"
    assert "not every rank sees all devices" in str(why_not_symmetric([("a", 0), ("a", 9)]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (1, 0))
    assert why_not_symmetric([("a", 0), ("a", 1)]) == "cuda:1 cannot see the memory of cuda:0"
