"""The client of docs/examples when something is wrong: it says so and ends, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import Servers, secured_servers

pytestmark = pytest.mark.servers

EXAMPLE = Path(__file__).parents[2] / "docs/examples/nats_client.py"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory):
    with secured_servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


def run(*arguments: str, password: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        env={**os.environ, "NATS_USER": "operator", "NATS_PASSWORD": password},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [(), ("nats://127.0.0.1:1", "m"), ("nats://127.0.0.1:1", "m", "x")])
def test_arguments_it_cannot_use_are_answered_with_its_usage(arguments: tuple[str, ...]) -> None:
    status, said = run(*arguments)
    assert status == 1
    assert "Usage: nats_client.py NATS_URL MODEL ID" in said


def test_a_model_nobody_serves_is_given_up(servers: Servers) -> None:
    password = servers.credentials.nats["operator"].password
    status, said = run(servers.nats_url, "no-such-model", "1", password=password)
    assert status == 1
    assert "does a mesh serve 'no-such-model' here?" in said


def test_a_wrong_password_is_told(servers: Servers) -> None:
    status, said = run(servers.nats_url, "m", "1", password="wrong")
    assert status == 1
    assert "as operator: nats: 'Authorization Violation'" in said
