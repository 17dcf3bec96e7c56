"""Memory through `hortator up` and `status`: refused with the arithmetic, sized to what is left, told."""

import json
from pathlib import Path

import pytest

from services.worker.memory.ledger import CLASSES, Ledger
from tests.support.mesh import Mesh

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GIB = 1 << 30


def test_what_does_not_fit_is_refused_with_the_arithmetic_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as refused:
        Mesh.launch(tmp_path, "--kv-memory", "900GiB")
    said = str(refused.value)
    for part in (
        "w0 cannot start: the model would take runtime",
        "+ weights 258.",
        "+ KV 900.0 GiB",
        "lower --kv",
    ):
        assert part in said
    assert '"event":"kernels' not in (tmp_path / "run" / "log" / "w0.log").read_text()


def test_two_instances_share_what_there_is_and_tell_what_they_took(tmp_path: Path) -> None:
    flags = ("--instances", "2", "--kv-memory", "auto", "--tier-memory", "0", "--threads", "1")
    with Mesh.start(tmp_path, *flags, "--set", "worker.memory=1GiB") as mesh:
        report = json.loads(mesh.hortator("status", "--json").stdout)
        text = mesh.hortator("status").stdout
    assert len(report["instances"]) == 2
    for row in report["instances"]:
        memory = row["memory"]
        assert sorted(memory["measured"]) == sorted((*CLASSES, "total_bytes"))
        (rank,) = memory["ranks"]
        assert Ledger.of(rank["measured"]) == Ledger.of(memory["measured"])
        assert 0.9 * GIB < memory["predicted"]["total_bytes"] <= GIB
        assert memory["measured"]["total_bytes"] <= 1.03 * GIB
        assert memory["resident_bytes"] <= 1.03 * GIB
        assert memory["warnings"] == []
        assert f"{row['id']}: memory: " in text
        assert f"{row['id']}: KV blocks of 32 tokens" in text
