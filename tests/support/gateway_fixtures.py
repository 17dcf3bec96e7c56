"""Fixtures for tests of the gateway's HTTP surface; name this module in `pytest_plugins`.

One gateway serves a whole module, because starting and stopping one costs more than most tests; its backend
is reset before each test. Such a module needs `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fake_backend import Script
from tests.support.gateway_harness import Harness, gateway_on
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-folder")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _gateway_of_module(tiny_folder: Path) -> AsyncIterator[Harness]:
    async with gateway_on(tiny_folder) as harness:
        yield harness


@pytest_asyncio.fixture(loop_scope="module")
async def tiny_mesh(_gateway_of_module: Harness) -> Harness:
    harness, backend = _gateway_of_module, _gateway_of_module.backend
    await harness.until(lambda: harness.gateway.open_requests == 0)
    await harness.until(lambda: not [s for s in backend._seqs.values() if s.script.hang_after is None])
    backend._seqs.clear()
    for seen in (backend.submits, backend.cancels, backend.acks):
        seen.clear()
    backend.step_s, backend.silent = 0.0, False
    harness.script(Script())
    return harness
