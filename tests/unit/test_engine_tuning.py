"""How a group agrees on its algorithms and its chunks, and what it tells of its communication."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_support import save_tiny

torch = pytest.importorskip("torch")

from services.worker.engine.kvcache import KvCache, KvPlan  # noqa: E402
from services.worker.engine.native import build  # noqa: E402
from services.worker.engine.shards import shard_of  # noqa: E402
from services.worker.engine.weights import ModelFolder  # noqa: E402
from tests.support.thread_group import ThreadRank, on_ranks  # noqa: E402

try:
    from services.worker.engine.crossing import from_rank_0
    from services.worker.engine.formats import weight_format
    from services.worker.engine.native.decoder import Kernels, NativeDecoder
    from services.worker.engine.tuning import Tuning

    build.load()
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")

MOST_TOKENS = 512


class TimedRank:
    """A rank whose sums take the times a test gives: each rank measures others, and rank 0's count."""

    def __init__(self, end: ThreadRank, latency_s: float, s_per_byte: float) -> None:
        self._end = end
        self._cost = latency_s, s_per_byte
        self.table: list[tuple[int, str]] = []
        self.timed = 0
        self.lone_s = 1e-5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def algorithms(self) -> tuple[str, ...]:
        return "one-shot", "ring"

    def time(self, algorithm: str, floats: int, repeats: int) -> tuple[float, float]:
        self.timed += 1
        latency, per_byte = self._cost
        if algorithm == "one-shot":  # quick to begin, slow to go on
            latency, per_byte = latency / 4, 4 * per_byte
        # What each rank's clock shows differs.
        seconds = (latency + 4 * floats * per_byte) * (1 + 0.3 * self._end.rank)
        return seconds, seconds

    def busy_s(self) -> float:
        return 0.0

    def drift(self) -> dict[str, dict[int, float]]:
        # As rank 0 often does, it comes last and sees nothing.
        return (
            {name: {8: self.lone_s, 9: self.lone_s} for name in self.algorithms()} if self._end.rank else {}
        )

    def set_table(self, table: list[tuple[int, str]]) -> None:
        self.table = table


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only of what is remembered: compiled kernels stay where they are.
    place = SimpleNamespace(cache_dir=lambda: tmp_path / "kernels")
    monkeypatch.setattr("services.worker.engine.remembered.build", place)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512)
    return path


def tuned(
    model: Path, end: ThreadRank, latency_s: float, s_per_byte: float, group: str = "a test's"
) -> tuple[Tuning, TimedRank]:
    rank = TimedRank(end, latency_s, s_per_byte)
    shard = shard_of(ModelFolder(model), end.rank, end.size)
    kv = KvCache(shard.config, KvPlan(16, 0, 32), "float32", torch.device("cpu"))
    decoder = NativeDecoder(Kernels(1), shard, weight_format("float32"), kv, end)
    tuning = Tuning(rank, decoder, kv, shard.whole, MOST_TOKENS, {"group": group})  # type: ignore[arg-type]
    return tuning, rank


def test_all_ranks_use_what_rank_0_measured_and_plan_alike(model: Path) -> None:
    found = on_ranks(3, lambda end: tuned(model, end, 1e-5, 1e-9))
    tables = [rank.table for _, rank in found]
    assert tables[0] == tables[1] == tables[2]
    assert [name for _, name in tables[0]] == ["one-shot", "ring"]
    assert {tuning.table.timings for tuning, _ in found if tuning.table} == {found[0][0].table.timings}  # type: ignore[union-attr]
    for tokens in (1, 7, 100, 512):
        plans = {tuple(tuning.plan(tokens).tolist()) for tuning, _ in found}
        assert len(plans) == 1


def test_a_group_measures_once_and_remembers(model: Path) -> None:
    first = on_ranks(2, lambda end: tuned(model, end, 1e-5, 1e-9))
    again = on_ranks(2, lambda end: tuned(model, end, 5e-3, 1e-7))
    assert first[0][1].timed > 0
    assert again[0][1].timed == again[1][1].timed == 0
    assert again[0][1].table == first[0][1].table


def test_single_tokens_are_one_chunk_and_prompts_on_a_slow_link_several(model: Path) -> None:
    slow = on_ranks(2, lambda end: tuned(model, end, 1e-6, 2e-9))[0][0]
    assert len(slow.plan(1)) == 2
    assert len(slow.plan(512)) > 2


def test_what_rank_0_learns_is_told_and_changes_every_ranks_plans(model: Path) -> None:
    def work(end: ThreadRank) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        tuning, _ = tuned(model, end, 1e-6, 2e-9)
        before = tuple(tuning.plan(512).tolist())
        # Steps in which messages cost far more than computing: nothing is gained by cutting.
        for _ in range(60):
            tuning._decoder._spent[:] += 1e-7
            tuning._decoder._spent[-1] += 5.0
            tuning.observe(512)
        news = tuning.news()
        told = from_rank_0(end, repr(news).encode())
        tuning.tune(eval(told))
        return before, tuple(tuning.plan(512).tolist()), news is None

    results = on_ranks(2, work)
    assert results[0][2] is False
    assert results[1][2] is True  # ranks above 0 learn nothing of their own
    assert results[0][:2] == results[1][:2]


def test_measuring_anew_replaces_the_table_on_all_ranks(model: Path) -> None:
    def work(end: ThreadRank) -> tuple[Any, Any]:
        tuning, rank = tuned(model, end, 1e-5, 1e-9)
        rank._cost = 1e-3, 1e-9
        before = rank.table
        tuning.measure_anew()
        return before, rank.table

    results = on_ranks(2, work)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_advice_comes_on_a_slow_link_and_not_on_a_fast_one(model: Path) -> None:
    def advice_at(s_per_byte: float) -> list[str]:
        def work(end: ThreadRank) -> list[str]:
            tuning, _ = tuned(model, end, 1e-7, s_per_byte, f"{s_per_byte}")
            for _ in range(10):
                tuning._decoder._spent[:] += 0.5e-3
                tuning.observe(128)
            return list(tuning.report()["advice"])

        return on_ranks(2, work)[0]

    assert advice_at(1e-12) == []
    (slow,) = advice_at(1e-5) or [""]
    assert "one rank alone" in slow


def test_a_step_is_told_with_what_its_messages_take_alone(model: Path) -> None:
    tuning, _ = on_ranks(2, lambda end: tuned(model, end, 1e-5, 1e-9))[0]
    tuning._decoder._spent[:] += 1e-3
    tuning.observe(1)
    report = tuning.report()
    messages = 1 + 2 * 3
    assert tuning.table is not None
    assert report["communication_s"] == pytest.approx(messages * tuning.table.predict(96 * 4), rel=1e-6)
    assert report["exposed_communication_s"] == pytest.approx(1e-3)
    assert np.isclose(report["recent"]["decode"]["exposed_us"], 1e3 / 3, rtol=0.01)


def test_messages_that_take_longer_than_they_did_are_measured_anew_on_all_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(end: ThreadRank) -> list[int]:
        tuning, rank = tuned(model, end, 1e-5, 1e-9)
        timed = []
        for lone_s in (1e-5, 1.1e-5, 3e-5):
            rank.lone_s = lone_s
            for _ in range(8):
                clock["now"] += 5.0
                for _ in range(40):
                    tuning._decoder._spent[:] += 1e-5
                    tuning.observe(1)
                    told = from_rank_0(end, repr(tuning.news()).encode())
                    if (state := eval(told)) is not None:
                        tuning.tune(state)
            timed.append(rank.timed)
        return timed

    clock = {"now": 0.0}
    monkeypatch.setattr("services.worker.engine.tuning.time.monotonic", lambda: clock["now"])
    for first, second, third in on_ranks(2, work):
        assert first == second  # a tenth more is no reason
        assert third > second
