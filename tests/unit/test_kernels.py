"""Native kernels against torch: shapes and formats; and that a row never depends on its neighbours."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engine.device import Device  # noqa: E402
from services.worker.engine.formats import FORMATS, quantize_groups, rounded  # noqa: E402
from services.worker.engine.native import build  # noqa: E402

try:
    from services.worker.engine.native.decoder import Kernels, interleave, round_up

    KERNELS = Kernels(2)
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


FORM = st.sampled_from(list(FORMATS.values()))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantized(x):
    codes, scales = quantize_groups(x)
    return (codes.view(*scales.shape, -1) * scales[..., None]).view(len(x), -1)[:, : x.shape[1]]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 700),
    m=st.one_of(st.integers(1, 20), st.integers(180, 230)),
    form=FORM,
    biased=st.booleans(),
    add=st.booleans(),
)
def test_products_match_torch_for_any_shape(n, k, m, form, biased, add):
    weight, x = random(n, k, seed=1), random(m, k, seed=2)
    bias = random(n, seed=3) if biased else None
    into = random(m, round_up(n), seed=4)
    left = dequantized(x) if form.dynamic else x
    expected = left.double() @ rounded(weight, form).double().T
    expected += 0 if bias is None else bias.double()
    expected += into[:, :n].double() if add else 0
    got = KERNELS.pack(weight, form, bias).multiply(x, into.clone() if add else None)
    assert got.shape == (m, round_up(n))
    assert torch.allclose(got[:, :n].double(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(2, 220), row=st.integers(0, 10_000), k=st.integers(1, 700), form=FORM)
def test_a_rows_product_has_the_same_bits_whatever_stands_beside_it(m, row, k, form):
    packed, x = KERNELS.pack(random(33, k), form), random(m, k, seed=1)
    row %= m
    alone = packed.multiply(x[row : row + 1].contiguous())
    assert torch.equal(packed.multiply(x)[row], alone[0])


def test_weights_beyond_the_range_of_sixteen_bit_are_clamped_not_infinite():
    packed = KERNELS.pack(torch.tensor([[1e6], [-1e6]]), FORMATS["float16"])
    assert packed.multiply(torch.ones(1, 1))[0, :2].tolist() == [65504.0, -65504.0]


@settings(max_examples=15, deadline=None)
@given(k=st.integers(1, 300), form=st.sampled_from([f for f in FORMATS.values() if f.top]))
def test_int8_products_are_those_of_the_reference(k, form):
    weight, x = random(40, k, seed=5), random(9, k, seed=6)
    bias = random(40, seed=7)
    expected = Device("cpu", form.name).linear(weight, bias)(x)
    got = KERNELS.pack(weight, form, bias).multiply(x)[:, :40]
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_codes_do_not_saturate(sign):
    k = 1536
    weight, x = torch.full((16, k), 3.0), torch.full((8, k), 2.0 * sign)
    packed = KERNELS.pack(weight, FORMATS["int8-dynamic"])
    assert torch.allclose(packed.multiply(x), torch.full((8, 16), 6.0 * k * sign), rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_row_and_its_output_alone(form, bad):
    weight, x = random(20, 100), random(5, 100, seed=1)
    clean = KERNELS.pack(weight, form).multiply(x)[:, :20]
    spoilt_x = x.clone()
    spoilt_x[3, 70] = bad
    got = KERNELS.pack(weight, form).multiply(spoilt_x)[:, :20]
    assert not got[3].isfinite().any()
    assert torch.equal(got[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])
    if form.name == "float16" and bad == float("inf"):
        return  # 16-bit weights are clamped
    weight[7, 40] = bad
    got = KERNELS.pack(weight, form).multiply(x)[:, :20]
    assert not got[:, 7].isfinite().any()
    others = [i for i in range(20) if i != 7]
    assert torch.equal(got[:, others], clean[:, others])


@given(n=st.integers(1, 70), k=st.integers(1, 5))
def test_interleaving_puts_panels_of_gate_and_up_in_turn(n, k):
    gate, up = random(n, k), random(n, k, seed=1)
    both = interleave(torch.cat([gate, up]))
    for i in range(n):
        panel, lane = divmod(i, 16)
        assert torch.equal(both[panel * 32 + lane], gate[i])
        assert torch.equal(both[panel * 32 + 16 + lane], up[i])
    assert len(both) == 2 * round_up(n)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 70),
    spoil=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 69), st.sampled_from(["nan", "inf", "-inf"]))),
)
def test_scanning_rows_finds_the_first_maximum_and_what_is_not_finite(rows, size, spoil):
    wide = np.random.default_rng(size).integers(-3, 4, size=(rows, size + 9)).astype(np.float32)
    values = wide[:, :size]
    for r, c, bad in spoil:
        if r < rows and c < size:
            values[r, c] = float(bad)
    finite, best = KERNELS.scan(values)
    for r in range(rows):
        assert finite[r] == np.isfinite(values[r]).all()
        if finite[r]:
            assert best[r] == values[r].argmax()


def test_every_format_can_be_asked_for_on_the_command_line():
    from typing import get_args, get_type_hints

    from deploy.options import Dtype
    from services.worker.settings import WorkerSettings

    offered = get_type_hints(WorkerSettings)["dtype"]
    assert {*FORMATS, "bfloat16"} == set(get_args(offered)) == set(get_args(Dtype))
    with pytest.raises(ValueError, match="--dtype int4: choose one of float32, float16, int8, int8-dynamic"):
        Device("cpu", "int4")


def fake_compiler(path, script):
    """A compiler that knows its version, and does `script` when it is to compile."""
    version = '[ "$out" = --version ] && exec echo fake'
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{version}\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def kernel_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.mark.parametrize("keep", [0, 20, 4096, 30_000])
def test_a_library_that_was_cut_off_is_compiled_anew_and_never_loaded(
    keep, kernel_cache, monkeypatch, tmp_path
):
    monkeypatch.setenv(
        "CXX", fake_compiler(tmp_path / "cc", f"head -c 60000 /dev/zero > $out; echo >> {tmp_path}/calls")
    )
    library = build.ensure()
    whole = library.read_bytes()
    assert build.ensure() == library
    library.write_bytes(whole[:keep])
    assert build.ensure().read_bytes() == whole
    assert (tmp_path / "calls").read_text() == "\n\n"
    assert [file.name for file in kernel_cache.iterdir()] == [library.name]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no space left; exit 3", "no space left"),
        ("exit 0", "compiling into .*HORTATOR_CACHE"),
        ("sleep 1000 & sleep 1000", "did not end within"),
    ],
)
def test_a_compiler_that_does_not_compile_is_named_with_what_it_said(
    script, words, kernel_cache, monkeypatch, tmp_path
):
    monkeypatch.setattr(build, "_COMPILE_S", 0.2)
    compiler = fake_compiler(tmp_path / "cc", script)
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.KernelsUnavailable, match=words):
        build.ensure()
    assert list(kernel_cache.iterdir()) == []


def test_what_a_killed_compilation_left_is_swept_but_not_one_at_work(
    kernel_cache, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "cc", "echo > $out"))
    for name, age_s in (("compiling-old", 10_000), ("compiling-at-work", 5)):
        (kernel_cache / name).mkdir(parents=True)
        os.utime(kernel_cache / name, (time.time() - age_s,) * 2)
    with caplog.at_level("INFO"):
        library = build.ensure()
    assert {file.name for file in kernel_cache.iterdir()} == {"compiling-at-work", library.name}
    assert "compiling the native kernels" in caplog.text


def test_a_compiler_may_be_named_with_arguments(kernel_cache, monkeypatch, tmp_path):
    compiler = fake_compiler(tmp_path / "cc", "echo $1 > $out")
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    assert b"-pipe\n" in build.ensure().read_bytes()
    monkeypatch.setenv("CXX", f"{compiler} '")
    with pytest.raises(build.KernelsUnavailable, match="is not a command"):
        build.ensure()


def test_kernels_lie_in_the_same_cache_as_models(monkeypatch, tmp_path):
    from shared.model.cache import ModelCache

    monkeypatch.delenv("HORTATOR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == ModelCache().root / "kernels" == tmp_path / "hortator" / "kernels"


def test_without_a_compiler_the_reason_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))
    with pytest.raises(build.KernelsUnavailable, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        build.load()


def test_without_a_compiler_the_model_is_computed_by_torch_and_the_log_says_why(
    monkeypatch, tmp_path, caplog
):
    pytest.importorskip("transformers")
    from engine_support import Driver, greedy, save_tiny

    from services.worker.engine.executor import EngineOptions, TorchExecutor

    save_tiny("llama", tmp_path / "model")
    monkeypatch.setenv("CXX", "no-such-compiler")
    executor = TorchExecutor(tmp_path / "model", EngineOptions(measure_s=0.0, kv_bytes=8 << 20))
    assert dict(executor.info.detail)["kernels"] == "torch"
    assert "no C++ compiler" in dict(executor.info.detail)["kernels_reason"]
    assert "no-such-compiler" in caplog.text
    assert len(Driver(executor).generate([[1, 2]], [greedy(2)])[0].tokens) == 2
    with pytest.raises(build.KernelsUnavailable):
        TorchExecutor(tmp_path / "model", EngineOptions(kernels="native", kv_bytes=8 << 20))


@pytest.mark.slow
def test_two_processes_may_compile_at_once(tmp_path):
    code = "from services.worker.engine.native import build; build.load(); print('loaded')"
    env = os.environ | {"HORTATOR_CACHE": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    assert [racer.communicate(timeout=100)[0] for racer in racers] == ["loaded\n", "loaded\n"]
    assert len(list((tmp_path / "kernels").iterdir())) == 1


LEAVE_WITHIN_A_PRODUCT = """
import threading, time, torch
from services.worker.engine.formats import FORMATS
from services.worker.engine.native.decoder import Kernels
kernels, begun = Kernels(2), threading.Event()
matrix, x = kernels.pack(torch.randn(512, 512), FORMATS["float32"]), torch.randn(20_000, 512)
def work():
    while True:
        begun.set()
        matrix.multiply(x)
threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(0.02)
"""


def test_a_process_that_ends_within_a_step_does_not_crash():
    """The worker does when a step takes longer than it may. It crashed in two of five runs."""
    for _ in range(3):
        command = [sys.executable, "-c", LEAVE_WITHIN_A_PRODUCT]
        assert subprocess.run(command, timeout=60, check=False).returncode == 0


TOO_MANY_THREADS = """
import resource
from services.worker.engine.native import build
from services.worker.engine.native.decoder import Kernels
Kernels(2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
try:
    Kernels(1000)
except build.KernelsUnavailable as error:
    print(error)
"""


def test_threads_that_the_system_does_not_grant_are_an_error_not_the_end():
    done = subprocess.run(
        [sys.executable, "-c", TOO_MANY_THREADS], capture_output=True, text=True, timeout=60
    )
    assert "1000 threads cannot be started" in done.stdout, done.stderr
