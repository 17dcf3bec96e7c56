"""Fixtures for tests of the gateway's HTTP surface; name this module in `pytest_plugins`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway_harness import Harness, gateway_on
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-folder")


@pytest.fixture
async def tiny_mesh(tiny_folder: Path) -> AsyncIterator[Harness]:
    async with gateway_on(tiny_folder) as harness:
        yield harness
