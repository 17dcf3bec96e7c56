"""`pytest_plugins`: torch on one thread for a module that asks for it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Threads of torch wait for each other at every tiny operation, and for the kernels' teams."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
