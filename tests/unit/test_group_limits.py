"""What a group is refused at its start, and what ends it while it loads."""

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.worker.collective.port import GroupLost
from services.worker.compute import Compute
from services.worker.group.channel import Channel
from services.worker.group.follower import follow
from services.worker.group.layout import cores_here
from services.worker.group.messages import FROM_RANK, TO_RANK, Refusal
from services.worker.settings import WorkerSettings
from shared.runtime.settings import CannotStart, SettingsError


def test_cores_that_the_machine_does_not_have_are_named_before_a_rank_is_started() -> None:
    with pytest.raises(SettingsError, match=r"this process may not use \[9999\], only \["):
        cores_here(WorkerSettings(instance="w0", tp=2, cores=f"{min(os.sched_getaffinity(0))},9999"))


def test_an_instance_without_cores_of_its_own_shares_those_of_its_process() -> None:
    assert list(cores_here(WorkerSettings(instance="w0", tp=2))) == sorted(os.sched_getaffinity(0))


def test_nobody_goes_on_loading_layers_for_a_group_that_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from engine_support import save_tiny

    from services.worker.engine.shards import shard_of
    from services.worker.engine.weights import ModelFolder

    save_tiny("llama", tmp_path)
    asked: list[None] = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise GroupLost("rank 1 was killed")

    with pytest.raises(GroupLost, match="rank 1 was killed"):
        list(shard_of(ModelFolder(tmp_path), 0, 2, check=check).layers())
    assert len(asked) == 2


def test_a_rank_is_refused_more_threads_than_are_of_use_as_one_alone_is(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from engine_support import save_tiny

    from services.worker.collective.port import LOOPBACK
    from services.worker.engine.choose import Scope
    from services.worker.engine.device import Device
    from services.worker.engine.grouped import choose_in_group
    from services.worker.engine.kvcache import KvCache, plan_kv
    from services.worker.engine.weights import ModelFolder

    save_tiny("llama", tmp_path)
    folder = ModelFolder(tmp_path)
    device = Device("cpu", "float32")
    kv = KvCache(folder.config, plan_kv(folder.config, "float32", 1 << 20, 16), "float32", device.torch)
    with pytest.raises(ValueError, match="--threads 1000000: from 1 to "):
        choose_in_group(folder, device, kv, Scope("torch", threads=1_000_000), LOOPBACK)


def test_a_rank_that_loaded_another_model_is_told_so_and_not_only_that_rank_0_is_gone() -> None:
    ours, theirs = socket.socketpair()
    lead, rank = Channel(ours, FROM_RANK), Channel(theirs, TO_RANK)
    lead.send(Refusal("rank 1 (node 1): fingerprint is a, of rank 0 b; it loaded another model"))
    lead.close()
    with pytest.raises(CannotStart, match="it loaded another model"):
        follow(Mock(Compute), rank)
    rank.close()
