"""Sums of tensors and sums by torch.distributed, on CPUs; in processes where some have to end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from engine_support import save_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.collective.nccl import Nccl  # noqa: E402
from services.worker.collective.port import LOOPBACK, GroupLost  # noqa: E402
from services.worker.collective.tensors import ChosenReducer, HostReducer, Way  # noqa: E402
from services.worker.collective.torch_dist import TorchDistCollective, open_store, shared_store  # noqa: E402
from services.worker.engine.crossing import crossovers  # noqa: E402
from tests.support.thread_group import on_ranks  # noqa: E402

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")

T = TypeVar("T")
CPU = torch.device("cpu")


def on_gloo(
    size: int, path: Path, work: Callable[[TorchDistCollective], T], limit_s: float = 10.0
) -> list[T]:
    """`work` on every rank of a gloo group at once, each a thread; its results by rank."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    done = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            store = open_store(f"file://{path}", rank, size)
            end = TorchDistCollective(store, rank, size, limit_s, host="127.0.0.1")
            results[rank] = work(end)
            # Whoever closes first ends the others' last message.
            done.wait(30)
            end.close()
        except BaseException as error:
            errors.append(error)
            done.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    return tmp_path / "store"


def parts_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_the_same_bits_on_all_ranks_by_every_algorithm(size: int, meeting: Path) -> None:
    floats = (1, 7, 576, 20_000)

    def work(end: TorchDistCollective) -> list[np.ndarray]:
        found = []
        for algorithm in end.algorithms():
            end.set_table([(1 << 62, algorithm)])
            for count in floats:
                found.append(parts_of(end.rank, count))
                end.all_reduce(found[-1])
        return found

    results = on_gloo(size, meeting, work)
    expected = [sum(parts_of(rank, count).astype(np.float64) for rank in range(size)) for count in floats] * 2
    for number, total in enumerate(expected):
        np.testing.assert_allclose(results[0][number], total, atol=1e-5)
        assert all(np.array_equal(results[0][number], each[number]) for each in results)
    # By the first, parts are added in rank order.
    for number, count in enumerate(floats):
        total = parts_of(0, count)
        for rank in range(1, size):
            total += parts_of(rank, count)
        assert np.array_equal(results[0][number], total)


def test_what_ranks_gather_comes_by_rank(meeting: Path) -> None:
    rows = on_gloo(3, meeting, lambda end: end.gather(np.array([end.rank, 9], np.uint8)))
    assert all(each.tolist() == [[0, 9], [1, 9], [2, 9]] for each in rows)


def test_only_plain_float32_is_summed(meeting: Path) -> None:
    def work(end: TorchDistCollective) -> None:
        with pytest.raises(ValueError, match="contiguous writable float32"):
            end.all_reduce(np.zeros(4))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no sums by 'tree'"):
            end.set_table([(1 << 62, "tree")])

    on_gloo(2, meeting, work)


def test_native_passes_compute_through_gloo(meeting: Path, tmp_path: Path) -> None:
    from services.worker.engine.native import build

    try:
        from services.worker.engine.native.decoder import Kernels, NativeDecoder

        build.load()
    except build.KernelsUnavailable as error:
        pytest.skip(f"no native kernels here: {error}")
    from services.worker.engine.formats import weight_format
    from services.worker.engine.kvcache import KvCache, KvPlan
    from services.worker.engine.shards import shard_of
    from services.worker.engine.weights import ModelFolder
    from tests.support.tp_steps import BLOCK, Steps, cut, joined

    save_tiny("llama", tmp_path, num_attention_heads=6, head_dim=16, initializer_range=0.1)
    steps = Steps(3, 199)

    def logits(end: Any, algorithm: str = "") -> list[Any]:
        if algorithm:
            end.set_table([(1 << 62, algorithm)])
        shard = shard_of(ModelFolder(tmp_path), end.rank, end.size)
        kv = KvCache(shard.config, KvPlan(BLOCK, 0, steps.blocks), "float32", CPU)
        decoder = NativeDecoder(Kernels(1), shard, weight_format("float32"), kv, end)
        decoder.plan = lambda tokens: cut(tokens, 1 if end.size == 1 else 3)
        return [decoder.forward(batch).clone() for batch in steps.batches]

    expected = logits(LOOPBACK)
    for algorithm in ("gather", "ring"):
        got = joined(on_gloo(2, meeting.with_name(algorithm), lambda end, a=algorithm: logits(end, a)))
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_whoever_waits_is_freed_when_the_group_is_aborted(meeting: Path) -> None:
    freed = threading.Event()

    def work(end: TorchDistCollective) -> float:
        if end.rank == 1:
            assert freed.wait(20)
            return 0.0
        threading.Timer(0.2, lambda: end.abort("rank 1 was stopped")).start()
        begun = time.monotonic()
        with pytest.raises(GroupLost, match="rank 1 was stopped"):
            end.gather(np.zeros(8, np.uint8))
        took = time.monotonic() - begun
        freed.set()
        with pytest.raises(GroupLost):
            end.check()
        return took

    assert on_gloo(2, meeting, work)[0] < 1.2


def test_a_rank_that_lives_but_does_not_come_is_lost_after_the_limit(meeting: Path) -> None:
    gone = threading.Event()

    def work(end: TorchDistCollective) -> None:
        if end.rank == 0:
            with pytest.raises(GroupLost, match="does not come"):
                end.all_reduce(np.zeros(100, np.float32))
            gone.set()
        assert gone.wait(20)

    on_gloo(2, meeting, work, limit_s=0.5)


@pytest.mark.parametrize("address", ["", "file://relative", "tcp://host", "tcp://:1", "udp://a:1"])
def test_a_rendezvous_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give file:///PATH or tcp://HOST:PORT"):
        open_store(address, 0, 2)


def test_ranks_meet_over_tcp_in_a_store_that_their_group_agrees_on() -> None:
    def work(end: Any) -> float:
        store = shared_store(end)
        through = TorchDistCollective(store, end.rank, end.size, host="127.0.0.1")
        values = np.full(3, end.rank + 1, np.float32)
        through.all_reduce(values)
        end.gather(np.zeros(1, np.uint8))
        through.close()
        return float(values[0])

    assert on_ranks(2, work) == [3.0, 3.0]


_KILLED = """
import os, signal, sys, threading, time
import numpy as np
from services.worker.collective.port import GroupLost
from services.worker.collective.torch_dist import TorchDistCollective, open_store
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
end = TorchDistCollective(open_store("file://" + path, rank, size), rank, size, 30.0, "127.0.0.1")
end.gather(np.zeros(1, np.uint8))
print("formed", flush=True)
if rank == 1:
    signal.pause()
try:
    while True:
        end.all_reduce(np.zeros(300_000, np.float32))
except GroupLost as error:
    print("lost", time.time(), error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_killed_rank_is_noticed_by_all_within_a_second(meeting: Path) -> None:
    size = 4  # two of them have nothing under way with the one that is killed
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(rank), str(size), str(meeting)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "formed\n"
        killed = time.time()
        os.kill(ranks[1].pid, signal.SIGKILL)
        for number, rank in enumerate(ranks):
            out, _ = rank.communicate(timeout=20)
            if number != 1:
                word, when, *_ = out.split()
                assert word == "lost"
                assert float(when) - killed < 1.0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


# Sums of tensors.


@given(
    values=st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(deadline=None, max_examples=25)
def test_a_tensor_of_any_float_format_becomes_the_sum_where_it_is(values: list[float], dtype: Any) -> None:
    def work(end: Any) -> Any:
        part = (torch.tensor(values) * (end.rank + 1)).to(dtype)
        total = HostReducer(end).all_reduce(part)
        assert total.data_ptr() == part.data_ptr()
        return total

    expected = sum((torch.tensor(values) * rank).to(dtype).float() for rank in (1, 2, 3)).to(dtype)
    assert all(torch.equal(each, expected) for each in on_ranks(3, work))


def test_each_message_goes_by_the_algorithm_of_its_size_if_that_takes_it() -> None:
    gone: list[str] = []

    def way(name: str, **limits: Any) -> Way:
        def add(part: Any) -> Any:
            gone.append(name)
            return part

        return Way(add, **limits)

    ways = {
        "any": way("any"),
        "short": way("short", most_bytes=1000, formats=(torch.float32,), granule=16),
        "long": way("long"),
    }
    reducer = ChosenReducer(0, 2, ways, CPU, queues=True)
    reducer.all_reduce(torch.zeros(4))
    reducer.set_table([(2000, "short"), (1 << 62, "long")])
    for part in (
        torch.zeros(4),
        torch.zeros(3),
        torch.zeros(16, dtype=torch.float16),
        torch.zeros(8)[4:],
        torch.zeros(400),
        torch.zeros(501),
        torch.zeros(0),
    ):
        reducer.all_reduce(part)
    assert gone == ["any", "short", "any", "any", "any", "any", "long"]
    with pytest.raises(ValueError, match="no sums by 'other'"):
        reducer.set_table([(1, "other")])


def test_ways_are_timed_and_the_table_is_the_same_on_all_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))

    def work(end: Any) -> Any:
        plain = HostReducer(end).all_reduce

        def slow(part: Any) -> Any:
            for _ in range(5):
                plain(part.clone())
            return plain(part)

        reducer = ChosenReducer(end.rank, end.size, {"slow": Way(slow), "fast": Way(plain)}, CPU, False)
        table = crossovers(end, 1 << 14, {"test": str(tmp_path)}, through=reducer)
        assert table is not None
        return table.entries

    first, second = on_ranks(2, work)
    assert first == second
    assert [entry.algorithm for entry in first] == ["fast"]


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_what_to_install() -> None:
    with pytest.raises(ValueError, match="install a CUDA build"):
        Nccl(torch.distributed.HashStore(), 0, 1, torch.device("cuda:0"))
