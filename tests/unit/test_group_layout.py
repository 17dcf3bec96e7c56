"""Who is in a group and what each rank has of its machine; how ranks differ, and prove themselves."""

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from services.worker.group.facts import SAME, difference, facts_of, rank_env
from services.worker.group.handshake import Caller, NotOfTheGroup, OtherSecret, Purpose, examine, introduce
from services.worker.group.layout import devices_of, layout_of, rank_settings
from services.worker.group.local import MODULE, start_rank
from services.worker.group.membership import most_floats
from services.worker.parallel.pinning import Cpu
from services.worker.settings import WorkerSettings, parse_cores
from shared.runtime.settings import SettingsError, load


def settings(**more: Any) -> WorkerSettings:
    return WorkerSettings(**{"instance": "w0", "mock": True} | more)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
SEVERAL = {"rendezvous": "10.0.0.1:29400", "group_secret": "x" * 16}


@settings_of(deadline=None)
@given(size=st.integers(1, 64), data=st.data())
def test_every_rank_is_on_one_node_and_nodes_differ_by_one_rank_at_most(
    size: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(1, size))
    layout = layout_of(settings(tp=size, nodes=nodes, **(SEVERAL if nodes > 1 else {})))
    runs = [layout.ranks_of(node) for node in range(nodes)]
    assert [rank for run in runs for rank in run] == list(range(size))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert all(rank in runs[layout.node_of(rank)] for rank in range(size))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tp": 0}, "tp=0: a group has 1 to 64 ranks"),
        ({"tp": 65}, "tp=65: a group has 1 to 64 ranks"),
        ({"tp": 2, "nodes": 3} | SEVERAL, "nodes=3: choose 1 to 2"),
        ({"tp": 2, "nodes": 2, "node_rank": 2} | SEVERAL, r"node_rank=2: of 2 node\(s\), number them 0 to 1"),
        ({"node_rank": 1}, r"node_rank=1: of 1 node\(s\)"),
        ({"tp": 2, "rendezvous": "a:1"}, "are for a group on several nodes"),
        ({"tp": 2, "nodes": 2, "group_secret": "x" * 16}, "needs HOST:PORT of node 0"),
        ({"tp": 2, "nodes": 2, "group_secret": "x" * 16, "rendezvous": "host:0"}, "needs HOST:PORT"),
        ({"tp": 2, "nodes": 2, "rendezvous": "host:1"}, "needs group_secret"),
        ({"tp": 2, "nodes": 2, "rendezvous": "host:1", "group_secret": "short"}, "16 characters or more"),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_what_would_be_right(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why) as refusal:
        layout_of(settings(**wrong))
    assert "short" not in str(refusal.value)


@settings_of(deadline=None)
@given(cores=st.integers(0, 20), tp=st.integers(2, 8), spare=st.integers(1, 64))
def test_ranks_share_out_the_cores_of_their_instance(cores: int, tp: int, spare: int) -> None:
    of = settings(tp=tp, cores=",".join(map(str, range(cores))))
    each = [rank_settings(of, layout_of(of), rank, spare) for rank in range(tp)]
    shares = [parse_cores(rank.cores) for rank in each]
    # No core is shared, and none is left idle: or there are too few, and nobody is pinned.
    assert sorted(core for share in shares for core in share) == (list(range(cores)) if cores >= tp else [])
    assert all(rank.threads >= 1 for rank in each)
    if cores >= tp:
        assert [rank.threads for rank in each] == [len(share) for share in shares]
    else:
        assert [rank.threads for rank in each] == [max(1, spare // tp)] * tp
    assert {rank_settings(settings(tp=tp, threads=3), layout_of(of), 1, spare).threads} == {3}


def test_each_rank_of_a_node_gets_a_device_of_its_own() -> None:
    of = settings(tp=3, nodes=2, device="cuda:2,cuda:5", **SEVERAL)
    layout = layout_of(of)
    assert [rank_settings(of, layout, rank, 8).device for rank in layout.ranks_of(0)] == ["cuda:2", "cuda:5"]
    assert devices_of("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices_of("cpu", 3) == ["cpu", "cpu", "cpu"]
    for text in ("cuda:0", "cuda:0,cuda:0", "cuda:0,cuda:1,cuda:2"):
        with pytest.raises(SettingsError, match=r"name one device for each of 2 rank"):
            devices_of(text, 2)


def test_what_two_ranks_differ_in_is_named_with_both_values() -> None:
    ours = facts_of(settings(tp=2))
    assert difference(facts_of(settings(tp=2, threads=3, device="cuda:1")), ours) == ""
    theirs = facts_of(settings(tp=2, kv_memory="1GiB", block_tokens=32))
    assert difference(theirs, ours) == (
        "block_tokens is 32, of rank 0 0; kv_memory is 1GiB, of rank 0 512MiB"
    )
    assert difference(ours | {"version": "0.0.1"}, ours).startswith("version is 0.0.1, of rank 0 ")
    assert difference({}, ours)


def test_a_model_folder_with_other_files_is_another_model(tmp_path: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(10))
    first, second = (facts_of(settings(model_dir=str(tmp_path / name))) for name in ("a", "b"))
    assert first == second
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(11))
    assert "model_files is" in difference(facts_of(settings(model_dir=str(tmp_path / "b"))), first)


def test_a_rank_starts_where_neither_torch_nor_a_compiler_is() -> None:
    code = "import sys; sys.modules['torch'] = None; import services.worker.group.rank as r; r.can_native()"
    environ = {**os.environ, "CXX": "/nowhere", "HORTATOR_CACHE": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_model_that_cannot_be_split_so_is_refused_before_a_rank_is_started(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="--tp 5: only 4 query heads for as many ranks"):
        most_floats(settings(mock=False, model_dir=str(tmp_path), tp=5))
    floats = most_floats(settings(mock=False, model_dir=str(tmp_path), tp=4, max_step_tokens=100_000))
    assert floats == 2 * 64 * 100_000
    assert most_floats(settings(mock=False, model_dir=str(tmp_path / "none"), tp=5))


def test_every_fact_is_a_setting() -> None:
    assert all(hasattr(settings(), name) for name in SAME)


def test_a_rank_reads_the_settings_of_its_worker_and_none_of_its_credentials(monkeypatch: Any) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr("subprocess.Popen", lambda argv, **how: started.update(argv=argv, **how))
    monkeypatch.setenv("HORTATOR_NATS_PASSWORD", "of the mesh")
    monkeypatch.setenv("OTHERS", "stay")
    of = settings(
        tp=2, nats_user="worker-w0", nats_password="of the mesh", redis_url="redis://u:of the mesh@h"
    )
    start_rank(of, ["--rank", "1"])
    assert started["argv"][-4:] == ["-m", MODULE, "--rank", "1"]
    assert not any("of the mesh" in text for text in (*started["argv"], *started["env"].values()))
    assert started["env"]["OTHERS"] == "stay"
    own = load(WorkerSettings, started["env"])
    assert (own.tp, own.mock, own.instance) == (2, True, "w0")
    assert "group_secret" not in repr(settings(**SEVERAL, tp=2, nodes=2))
    assert "HORTATOR_TP" in rank_env(of, {})


def shake_hands(secrets: tuple[str, str], caller: Caller) -> tuple[Any, Any]:
    """What the connector and the acceptor find."""
    ours, theirs = socket.socketpair()
    found: list[Any] = []

    def accept() -> None:
        try:
            found.append(examine(theirs, secrets[1]))
        except NotOfTheGroup as error:
            found.append(error)

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        introduce(ours, secrets[0], caller)
        answer: Any = None
    except OtherSecret as error:
        answer = error
    ours.close()
    acceptor.join()
    theirs.close()
    return answer, found[0]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_who_knows_the_secret_is_believed_and_nobody_else(purpose: Purpose) -> None:
    assert shake_hands(("s" * 16, "s" * 16), Caller(purpose, 3)) == (None, Caller(purpose, 3))
    told, seen = shake_hands(("s" * 16, "t" * 16), Caller(purpose, 3))
    assert "set the same on all nodes" in str(told)
    assert "has another group_secret" in str(seen)


def test_a_handshake_cannot_be_replayed() -> None:
    caller = Caller(Purpose.CONTROL, 1)
    proxy, acceptor = socket.socketpair()
    connector, other = socket.socketpair()
    seen: list[Any] = []
    threads = [
        threading.Thread(target=introduce, args=(connector, "s" * 16, caller)),
        threading.Thread(target=lambda: seen.append(examine(acceptor, "s" * 16))),
    ]
    for thread in threads:
        thread.start()
    opening = other.recv(100)
    proxy.sendall(opening)
    other.sendall(proxy.recv(64, socket.MSG_WAITALL))
    proof = other.recv(32, socket.MSG_WAITALL)
    proxy.sendall(proof)
    for thread in threads:
        thread.join()
    assert seen == [caller]

    again, fresh = socket.socketpair()
    again.sendall(opening + proof)
    with pytest.raises(NotOfTheGroup, match="does not know the group_secret"):
        examine(fresh, "s" * 16)
    for sock in (proxy, acceptor, connector, other, again, fresh):
        sock.close()


@pytest.mark.parametrize(
    "sent", [b"", b"H", b"GET / HTTP/1.1\r\n\r\n" * 10, b"HORTGRP1", b"HORTGRP1" + bytes(35)]
)
def test_whoever_does_not_prove_itself_in_time_is_turned_away(sent: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.worker.group.handshake.LIMIT_S", 0.1)
    ours, theirs = socket.socketpair()
    ours.sendall(sent)
    with pytest.raises(NotOfTheGroup):
        examine(theirs, "s" * 16)
    ours.close()
    theirs.close()


def test_ranks_get_cores_of_one_cache_where_the_machine_tells() -> None:
    # Two caches of four processors each, two to a core: numbered as systems do, siblings far apart.
    cpus = [Cpu(i, i % 4, (i % 4) // 2, 0) for i in range(8)]
    of = settings(tp=2, cores="0-7")
    shares = [rank_settings(of, layout_of(of), rank, 8, cpus).cores for rank in range(2)]
    assert shares == ["0,1", "2,3"]
    assert [rank_settings(of, layout_of(of), rank, 8).cores for rank in range(2)] == ["0,1,2,3", "4,5,6,7"]
