"""How an engine is computed is chosen by measurement, and remembered until what it depends on changes."""

import fcntl
import json
import os

import pytest

pytest.importorskip("torch")

from engine_support import Driver, greedy, save_tiny

from services.worker.engine import choose as choosing
from services.worker.engine import cores
from services.worker.engine.choose import Candidate, Measured, Scope, Speed
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.native import build
from services.worker.engine.remembered import Remembered

try:
    LIBRARY = build.load()
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chosen") / "model"
    save_tiny("llama", path, num_hidden_layers=8)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own, and a machine that counts as idle however busy it is."""
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache" / "kernels")
    monkeypatch.setattr(build, "load", lambda: LIBRARY)
    monkeypatch.setattr(choosing, "_UNDISTURBED", 0.0)
    yield tmp_path / "cache" / "choices"
    os.sched_setaffinity(0, allowed)
    cores.release()


@pytest.fixture
def speeds(monkeypatch):
    """Speeds by candidate in place of measurements; the candidates tried, in order."""
    tried: list[Candidate] = []
    table: dict[Candidate, Speed] = {}

    def measure(builder, candidate, *rest):
        tried.append(candidate)
        return table.get(candidate, Speed(100.0, 0.1))

    monkeypatch.setattr(choosing, "_try", measure)
    return table, tried


def start(folder, **options):
    return TorchExecutor(folder, EngineOptions(kv_bytes=4 << 20, **({"measure_s": 0.05} | options)))


def detail(executor):
    return dict(executor.info.detail)


def candidates(executor):
    return json.loads(detail(executor)["candidates"])


def test_every_decoder_is_measured_with_every_thread_count_and_the_table_is_told(folder):
    executor = start(folder, measure_s=5.0)
    most = len(os.sched_getaffinity(0))
    table = candidates(executor)
    assert {(row["kernels"], row["threads"]) for row in table} == {
        (kernels, count) for kernels in ("native", "torch") for count in Scope().thread_counts()
    } or len(table) == choosing._SHOWN
    assert max(row["threads"] for row in table) <= most
    assert all(row["decode_ms"] > 0 and row["prefill_tok_s"] > 0 for row in table)
    chosen = [row for row in table if row["chosen"]]
    assert len(chosen) == 1
    assert detail(executor)["kernels"] == chosen[0]["kernels"]
    assert detail(executor)["threads"] == str(chosen[0]["threads"])


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_fastest_is_taken_and_computes(folder, speeds, kernels):
    table, _ = speeds
    table[Candidate(kernels, 1)] = Speed(1000.0, 0.01)
    executor = start(folder)
    assert detail(executor)["kernels"] == kernels
    assert detail(executor)["threads"] == "1"
    assert len(Driver(executor).generate([[1, 2, 3]], [greedy(4)])[0].tokens) == 4


def test_what_is_not_clearly_faster_does_not_displace_what_stands_first():
    first, second = Candidate("native", 2), Candidate("torch", 2)
    slow, little_faster, faster = Speed(100, 0.1), Speed(101, 0.099), Speed(110, 0.09)
    assert choosing._best([Measured(first, slow), Measured(second, little_faster)]).candidate == first
    assert choosing._best([Measured(first, slow), Measured(second, faster)]).candidate == second


def test_a_second_start_remembers_and_measures_nothing_again(folder, speeds, cache):
    table, tried = speeds
    table[Candidate("native", 1)] = Speed(1000.0, 0.01)
    start(folder)
    assert tried
    assert len(list(cache.iterdir())) == 1
    tried.clear()
    again = start(folder)
    assert tried == []
    assert detail(again)["threads"] == "1"
    assert "earlier start" in detail(again)["choice"]
    assert candidates(again)


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"kv_dtype": "float16"}, {"kernels": "native"}])
def test_other_circumstances_are_measured_for_themselves(folder, speeds, other):
    _, tried = speeds
    start(folder)
    tried.clear()
    start(folder, **other)
    assert tried


def test_new_kernels_are_measured_anew(folder, speeds, monkeypatch):
    _, tried = speeds
    start(folder)
    tried.clear()
    monkeypatch.setattr(build, "library_path", lambda: build.cache_dir() / "kernels-of-another-source.so")
    start(folder)
    assert tried


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff" * 9, b'{"depends_on": "x", "fact": {}}', b"[" * 9000]
)
def test_a_corrupt_or_foreign_file_is_ignored_and_replaced(folder, speeds, cache, content):
    _, tried = speeds
    start(folder)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    tried.clear()
    start(folder)
    assert tried
    assert file.read_bytes() == good


def test_a_file_that_names_what_is_no_candidate_is_ignored(folder, speeds, cache):
    _, tried = speeds
    start(folder)
    (file,) = cache.iterdir()
    record = json.loads(file.read_bytes())
    record["fact"]["chosen"]["threads"] = 4096
    file.write_text(json.dumps(record))
    tried.clear()
    assert detail(start(folder))["threads"] != "4096"
    assert tried


def test_what_was_measured_on_a_busy_machine_is_not_remembered(folder, speeds, cache, monkeypatch):
    monkeypatch.setattr(choosing, "_UNDISTURBED", 2.0)
    executor = start(folder)
    assert not cache.exists()
    assert "others wanted the cores" in detail(executor)["choice"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "file" / "kernels")
    memory = Remembered(int, "choices", {"a": 1})
    memory.keep(3)
    assert memory.recall() is None
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "kernels")
    memory = Remembered(int, "choices", {"a": 1})
    memory.path.mkdir(parents=True)
    memory.keep(3)
    assert memory.recall() is None
    assert list(memory.path.parent.iterdir()) == [memory.path]


def test_named_threads_and_kernels_leave_nothing_to_choose(folder, speeds):
    _, tried = speeds
    executor = start(folder, threads=1, kernels="native")
    assert tried == []
    assert detail(executor)["choice"] == "native, 1 thread: the only candidate"


def test_named_threads_narrow_the_candidates(folder, speeds):
    _, tried = speeds
    start(folder, threads=1)
    assert tried == [Candidate("native", 1), Candidate("torch", 1)]


def test_threads_are_pinned_only_to_the_cores_given_and_only_where_that_is_faster(folder, speeds):
    table, tried = speeds
    core = min(os.sched_getaffinity(0))
    table[Candidate("native", 1)] = Speed(1000.0, 0.01)
    allowed = os.sched_getaffinity(0)
    executor = start(folder, cores=(core,), kernels="native")
    assert tried == [Candidate("native", 1), Candidate("native", 1, pinned=True)]
    assert detail(executor)["pinned"] == "no"
    assert os.sched_getaffinity(0) == allowed
    executor.close()
    table[Candidate("native", 1, pinned=True)] = Speed(2000.0, 0.005)
    executor = start(folder, cores=(core,), kernels="native", kv_dtype="float16")
    assert detail(executor)["pinned"] == "yes"
    assert os.sched_getaffinity(0) == {core}


def test_two_processes_never_pin_threads_to_the_same_core(folder, speeds, tmp_path):
    table, tried = speeds
    table[Candidate("native", 1, pinned=True)] = Speed(2000.0, 0.005)
    core = min(os.sched_getaffinity(0))
    lock = tmp_path / "cache" / "cores" / f"{core}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("wb") as held:  # as by another process: locks belong to the open file
        fcntl.flock(held, fcntl.LOCK_EX)
        executor = start(folder, cores=(core,), kernels="native")
        assert detail(executor)["pinned"] == "no"
        assert tried == [Candidate("native", 1)]
    assert cores.claim([core])


def test_nothing_is_pinned_where_the_cores_are_not_known_to_be_ours(folder, speeds):
    _, tried = speeds
    start(folder)
    assert not any(candidate.pinned for candidate in tried)


@pytest.mark.parametrize("threads", [-1, 0, 100_000])
def test_numbers_of_threads_that_cannot_be_are_refused_before_anything_is_started(folder, threads):
    with pytest.raises(ValueError, match=f"--threads {threads}: from 1 to"):
        start(folder, threads=threads)


def test_cores_outside_of_what_the_process_may_use_are_refused(folder):
    with pytest.raises(ValueError, match="may only use"):
        start(folder, cores=(4095,))


def test_a_decoder_measured_with_few_layers_is_scaled_up_to_the_whole(folder):
    """The estimate is rough on a busy machine, but eight layers never pass for six."""
    executor = start(folder, measure_s=0.0, kernels="torch", threads=1)
    config, kv = executor.config, executor.kv
    whole = choosing.measure_speed(executor._decoder, kv, config.max_len, 0.3)
    doubled = choosing.measure_speed(executor._decoder, kv, config.max_len, 0.3, layers_times=2.0)
    assert 1.2 < doubled.decode_step_s / whole.decode_step_s < 3.5
