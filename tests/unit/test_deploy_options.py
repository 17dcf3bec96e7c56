"""Options of `hortator up`, the settings they become, and the command line around them."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import credentials as users
from deploy import mesh
from deploy.mesh import Places, share_cores, stages
from deploy.options import (
    BadOption,
    UpOptions,
    check_formats,
    check_group,
    check_settings,
    check_tier,
    instance_names,
    parse_http,
    parse_settings,
)
from deploy.rundir import RunDir
from deploy.servers import free_port, port_taken
from deploy.setup_torch import cuda_packages
from deploy.supervisor import told_error
from deploy.tap import decode
from services.kvstore.settings import KvstoreSettings, tier_options
from services.worker.engine.resident import Room
from shared.runtime.settings import load
from shared.wire import TierOffer, encode


def test_addresses_are_read_and_bad_ones_refused():
    assert parse_http("127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert parse_http("[::1]:0") == ("::1", 0)
    for text in ("8000", ":8000", "localhost", "localhost:70000", "localhost:http"):
        with pytest.raises(BadOption, match="HOST:PORT"):
            parse_http(text)


def test_ports_of_servers_are_none_that_outgoing_connections_get():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        port = free_port()
        assert 1024 < port < max(first, 12288)
        assert not port_taken("127.0.0.1", port)


def test_a_port_that_somebody_listens_on_is_taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert port_taken("127.0.0.1", listener.getsockname()[1])


def test_further_settings_are_read_per_service_and_reach_it(tmp_path):
    items = ("worker.mock_step_s=0.01", "scheduler.itl_target_ms=100", "worker.max_len=64")
    assert parse_settings(items) == {
        "worker": {"mock_step_s": "0.01", "max_len": "64"},
        "scheduler": {"itl_target_ms": "100"},
    }
    options = UpOptions(run_dir=tmp_path, set=items)
    args = options.as_args()
    assert [args[i + 1] for i, arg in enumerate(args) if arg == "--set"] == list(items)
    _, specs = _specs(tmp_path, options)
    assert next(s for s in specs if s.service == "worker").env["HORTATOR_MOCK_STEP_S"] == "0.01"
    assert "HORTATOR_MOCK_STEP_S" not in next(s for s in specs if s.service == "gateway").env


def test_devices_are_dealt_out_to_the_instances_in_turn(tmp_path):
    def devices(**options):
        _, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path, **options))
        return [s.env.get("HORTATOR_DEVICE") for s in specs if s.service == "worker"]

    assert devices(instances=3, device="cuda:0, cuda:1") == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(instances=2, device="cuda") == ["cuda", "cuda"]
    assert devices(instances=2) == [None, None]


def test_a_worker_is_told_its_group_and_devices_are_dealt_out_to_ranks(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sixteen characters at least\n")
    common = {"tp": 3, "nodes": 2, "rendezvous": "10.0.0.1:29400", "group_secret_file": secret}
    options = UpOptions(run_dir=tmp_path, **common, device="cuda:1,cuda:3")
    assert "sixteen" not in " ".join(options.as_args())
    _, specs = _specs(tmp_path, options)
    worker = next(s for s in specs if s.service == "worker")
    assert (worker.env["HORTATOR_TP"], worker.env["HORTATOR_NODES"]) == ("3", "2")
    assert worker.env["HORTATOR_RENDEZVOUS"] == "10.0.0.1:29400"
    assert worker.env["HORTATOR_GROUP_SECRET"] == "sixteen characters at least"
    assert worker.env["HORTATOR_DEVICE"] == "cuda:1,cuda:3"
    assert "HORTATOR_THREADS" not in worker.env
    assert not any("sixteen" in text for s in specs for text in (*s.argv, repr(s)))
    assert not any("HORTATOR_GROUP_SECRET" in s.env for s in specs if s.service != "worker")
    _, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path, **common, node_rank=1))
    assert [(s.name, s.env["HORTATOR_NODE_RANK"]) for s in specs] == [("w0", "1")]
    _, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path, tp=2, instances=2, device="cuda"))
    devices = [s.env["HORTATOR_DEVICE"] for s in specs if s.service == "worker"]
    assert devices == ["cuda:0,cuda:1", "cuda:2,cuda:3"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tp": 2, "nodes": 3}, "nodes=3: choose 1 to 2"),
        ({"tp": 2, "nodes": 2}, "nodes=2 needs HOST:PORT"),
        ({"tp": 2, "nodes": 2, "rendezvous": "a:1"}, "needs group_secret"),
        ({"tp": 2, "nodes": 2, "instances": 2}, "--instances 2: several nodes share one instance"),
        ({"tp": 2, "group_secret_file": Path("/nowhere")}, "--group-secret-file /nowhere cannot be read"),
    ],
)
def test_a_group_that_cannot_be_is_refused_before_anything_starts(tmp_path, options, complaint):
    with pytest.raises(BadOption, match=complaint):
        check_group(UpOptions(run_dir=tmp_path, **options))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device": "cuda:0", "tp": 2}, "--device cuda:0: name one device for each of 2 rank"),
        ({"device": "cuda:0,gpu", "tp": 2}, "--device gpu: write cpu, cuda"),
        ({"device": "gpu"}, "--device gpu: write cpu, cuda"),
        ({"device": "cuda:0,cpu,tpu", "instances": 3}, "--device tpu"),
        ({"device": "cuda:x"}, "--device cuda:x"),
        ({"device": "cuda", "dtype": "int8"}, "--dtype int8 on cuda"),
        ({"device": "cuda", "deterministic": True}, "--deterministic is computed on CPUs only"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 is computed on CUDA devices only"),
        ({"kv_dtype": "bfloat16"}, "--kv-dtype bfloat16"),
    ],
)
def test_formats_that_no_worker_could_serve_are_refused_before_anything_starts(tmp_path, options, complaint):
    with pytest.raises(BadOption, match=complaint):
        check_formats(UpOptions(run_dir=tmp_path, **options))


@pytest.mark.parametrize("item", ["", "worker", "worker.x", "worker.X Y=1"])
def test_a_setting_that_names_no_service_and_field_is_refused(item):
    with pytest.raises(BadOption, match=r"SERVICE\.FIELD=VALUE"):
        parse_settings([item])


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("nats.port=1", "'nats' is no service: gateway, scheduler, worker, kvstore"),
        ("scheduler.foo=1", "scheduler has no setting foo (`hortator scheduler --help` lists them)"),
        ("scheduler.itl_target=1", "scheduler has no setting itl_target; did you mean itl_target_ms?"),
        ("scheduler.itl_target_ms=abc", "--set scheduler.itl_target_ms='abc' cannot be read as float"),
        ("worker.kernels=fast", "--set worker.kernels='fast' is not one of auto, native, torch"),
    ],
)
def test_a_setting_that_its_service_would_refuse_is_refused_before_in_the_words_of_the_option(item, words):
    with pytest.raises(BadOption) as refusal:
        check_settings([item])
    assert words in str(refusal.value)
    assert "HORTATOR_" not in str(refusal.value)


def test_options_survive_the_way_through_a_command_line(tmp_path):
    options = UpOptions(run_dir=tmp_path, instances=3, mock=True, policy="static", kv_memory="64MiB")
    args = options.as_args()
    assert "--mock" in args
    assert args[args.index("--instances") + 1] == "3"
    assert args[args.index("--policy") + 1] == "static"
    assert "--api-key-file" not in args
    assert "--threads" not in args


@pytest.mark.parametrize(("cores", "instances"), [(1, 1), (2, 1), (5, 2), (8, 3), (64, 64)])
def test_cores_are_shared_out_whole_to_one_instance_each(cores, instances):
    shares = share_cores(range(cores), instances)
    assert len(shares) == instances
    assert sorted(core for share in shares for core in share) == list(range(cores))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_instances_than_cores_share_them_on_one_thread_each(tmp_path):
    assert share_cores([0, 1], 3) == [[], [], []]
    _, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path, instances=63))
    workers = [s.env for s in specs if s.service == "worker"]
    assert {env.get("HORTATOR_THREADS") for env in workers} <= {"1", None}
    if len(os.sched_getaffinity(0)) < 63:
        assert all("HORTATOR_CORES" not in env and env["HORTATOR_THREADS"] == "1" for env in workers)


def test_an_instance_is_told_its_cores_and_how_to_compute(tmp_path):
    options = UpOptions(run_dir=tmp_path, kernels="native", deterministic=True)
    assert {"--deterministic", "--kernels"} < set(options.as_args())
    _, specs = _specs(tmp_path, options)
    env = next(s for s in specs if s.service == "worker").env
    assert env["HORTATOR_CORES"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert env["HORTATOR_KERNELS"] == "native"
    assert env["HORTATOR_DETERMINISTIC"] == "1"
    assert "HORTATOR_THREADS" not in env


def test_a_second_tier_larger_than_what_memory_is_left_is_refused(tmp_path):
    with pytest.raises(BadOption, match=r"2GiB is more than the 1\.0 GiB available"):
        check_tier(UpOptions(run_dir=tmp_path, tier_memory="2GiB"), room=1 << 30)


def test_a_mesh_has_a_second_tier_unless_it_is_told_otherwise(tmp_path):
    def kvstore_of(**told):
        options = UpOptions(run_dir=tmp_path, **told)
        check_tier(options, room=1 << 30)
        env = next(s for s in _specs(tmp_path, options)[1] if s.service == "kvstore").env
        seen = {name: value for name, value in env.items() if name.startswith("HORTATOR_TIER")}
        return tier_options(load(KvstoreSettings, seen))

    usual = kvstore_of()
    assert (usual.memory_bytes, usual.disk_bytes, usual.folder) == (512 << 20, 0, None)
    with_disk = kvstore_of(tier_memory="1GiB", tier_disk="2GiB")
    assert (with_disk.memory_bytes, with_disk.disk_bytes) == (1 << 30, 2 << 30)
    assert with_disk.folder == tmp_path / "tier"
    assert kvstore_of(tier_memory="0") is None
    for wrong in ({"tier_memory": "lots"}, {"tier_memory": "0", "tier_disk": "1GiB"}):
        with pytest.raises(BadOption, match="--tier-"):
            kvstore_of(**wrong)


def _specs(tmp_path: Path, options: UpOptions):
    places = Places("nats-server", "redis-server", 1, 2, "m", Path("/models/m"), ("alias",), "127.0.0.1:8000")
    creds = users.generate(instance_names(options.instances))
    environ = {"PATH": "/bin", "HORTATOR_NATS_URL": "nats://elsewhere", "HORTATOR_CACHE": "/cache"}
    groups = stages(options, RunDir(tmp_path), creds, places, environ)
    return creds, [spec for group in groups for spec in group]


def test_each_process_gets_its_own_user_and_nobody_elses_password(tmp_path):
    creds, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path, instances=2))
    passwords = {name: user.password for name, user in creds.nats.items()} | {
        f"redis {name}": password for name, password in creds.redis.items()
    }
    for spec in specs:
        text = "\n".join(spec.env.values())
        held = {name for name, password in passwords.items() if password in text}
        user = f"worker-{spec.name}" if spec.service == "worker" else spec.name
        allowed = {"nats": set(), "redis": set()}.get(spec.name, {user, f"redis {user}"})
        assert held <= allowed, spec.name
        assert not any(password in " ".join(spec.argv) for password in passwords.values())
        assert "nats://elsewhere" not in text


def test_every_process_carries_the_mark_by_which_down_finds_it(tmp_path):
    _, specs = _specs(tmp_path, UpOptions(run_dir=tmp_path))
    for spec in specs:
        assert spec.env["HORTATOR_READY_FILE"] == str(tmp_path / "ready" / f"{spec.name}.json")


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker", "kvstore"])
def test_the_settings_of_every_service_are_ones_it_knows(tmp_path, service):
    from shared.runtime.settings import load

    options = UpOptions(
        run_dir=tmp_path,
        kv_dtype="float32",
        max_slots=8,
        mock=True,
        api_key_file=tmp_path / "keys",
        threads=1,
    )
    _, specs = _specs(tmp_path, options)
    spec = next(s for s in specs if s.service == service)
    module = importlib.import_module(f"services.{service}.settings")
    load(getattr(module, f"{service.capitalize()}Settings"), spec.env)
    assert spec.env["HORTATOR_CACHE"] == "/cache"


def test_running_a_service_imports_no_command_line_library():
    code = """
import sys
for name in ("typer", "rich", "psutil"):
    sys.modules[name] = None
sys.argv = ["hortator", "gateway", "unexpected"]
import deploy.cli
deploy.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "takes no arguments" in done.stderr, done.stderr


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker", "kvstore"])
def test_a_service_lists_its_settings_with_what_they_mean(service):
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", service, "--help"], capture_output=True, text=True, check=True
    )
    assert "HORTATOR_NATS_URL (default nats://127.0.0.1:4222)\n    Where the broker is." in done.stdout
    assert "One of debug, info, warning, error." in done.stdout
    assert "HORTATOR_CACHE" in done.stdout
    assert ("HORTATOR_REDIS_URL" in done.stdout) == (service in ("scheduler", "kvstore"))
    lines = done.stdout.splitlines()
    for setting, below in zip(lines, [*lines[1:], ""]):
        if setting.startswith("HORTATOR_"):
            assert below.startswith("    "), f"{setting} has no text"


def test_a_setting_a_service_does_not_know_is_told_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "kvstore"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HORTATOR_NATS_UR": "x"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "hortator kvstore: unknown setting HORTATOR_NATS_UR; did you mean HORTATOR_NATS_URL"
    )
    assert done.stderr.count("\n") == 1


def test_a_missing_extra_is_named_with_the_command_that_brings_it():
    code = """
import sys
sys.modules["typer"] = None
sys.argv = ["hortator", "up"]
import deploy.cli
deploy.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "typer is not installed: pip install '" in done.stderr
    assert "[local]'" in done.stderr


def test_help_where_only_services_are_installed_lists_them_and_says_what_brings_the_rest():
    code = """
import sys
sys.modules["typer"] = None
sys.argv = ["hortator", "--help"]
import deploy.cli
deploy.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for service in ("gateway", "scheduler", "worker", "kvstore"):
        assert f"hortator {service}" in done.stdout
    assert "[local]'" in done.stdout


@pytest.mark.parametrize("service", ["scheduler", "gateway", "worker"])
def test_a_service_that_cannot_start_says_why_in_one_log_line(service, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HORTATOR_")}
    wrong = {"scheduler": ("LOG_LEVEL", "loud"), "gateway": ("MODEL_DIR", str(tmp_path))}
    name, value = wrong.get(service, ("MODEL_DIR", str(tmp_path / "nothing")))
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}"],
        capture_output=True,
        text=True,
        check=False,
        env={**env, f"HORTATOR_{name}": value},
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert told_error(done.stdout).count(value) == 1
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stdout


def test_help_is_quick_because_it_imports_no_heavy_library():
    code = """
import sys
sys.argv = ["hortator", "--help"]
import deploy.cli
try:
    deploy.cli.main()
except SystemExit:
    pass
heavy = {"torch", "numpy", "nats", "fastapi", "matplotlib", "transformers", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_cuda_packages_are_recognised_in_a_report_of_pip():
    def report(*names: str) -> dict:
        return {"install": [{"metadata": {"name": name, "version": "1"}} for name in names]}

    assert cuda_packages(report("torch", "filelock", "sympy")) == []
    assert cuda_packages(report("torch", "nvidia-cublas-cu12", "triton")) == ["nvidia-cublas-cu12", "triton"]
    assert cuda_packages(report("torch", "cuda-bindings")) == ["cuda-bindings"]


def test_tap_does_not_show_the_secret_of_a_tier():
    offer = TierOffer(instance="k", host="h", port=1, secret="s3cret", born=1, memory_bytes=1, disk_bytes=0)
    shown = decode(encode(offer))
    assert shown["host"] == "h"
    assert "s3cret" not in str(shown)


def test_tap_shows_frames_of_any_content():
    import msgpack

    assert decode(msgpack.packb({"kind": "done", "hash": b"\x01\xff", "rows": [[1, 2.5, None]]})) == {
        "kind": "done",
        "hash": "01ff",
        "rows": [[1, 2.5, None]],
    }
    assert decode(b'{"name": "x"}') == {"name": "x"}
    assert decode(b"\xc1\xff text") == "\ufffd\ufffd text"
    assert decode(b"") == ""


@pytest.mark.parametrize("kv_memory", ["auto", "4GiB"])
def test_instances_that_start_at_once_have_to_fit_the_machine_together(tmp_path, monkeypatch, kv_memory):
    monkeypatch.setattr(mesh, "room_here", lambda: Room(13 << 30, "available on this machine"))
    options = UpOptions(run_dir=tmp_path, instances=3, kv_memory=kv_memory, tier_memory="1GiB")
    _, specs = _specs(tmp_path, options)
    assert [s.env["HORTATOR_MEMORY"] for s in specs if s.service == "worker"] == [str(4 << 30)] * 3
