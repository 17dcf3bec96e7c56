"""The seam between the second tier and an executor: the content of its KV blocks, as bytes of this rank."""

from typing import Protocol, runtime_checkable


class KvMemory(Protocol):
    """Blocks [0, n) of one rank. Called from several threads; each knows that nobody writes its block."""

    @property
    def block_bytes(self) -> int:
        """Of one block, on this rank."""
        ...

    def view(self, block: int) -> memoryview:
        """Its content, `block_bytes` long: where it lies in host memory, else a copy made now."""
        ...

    def write(self, block: int, data: memoryview) -> None:
        """Replace its content. What is computed from now on finds it complete."""
        ...


@runtime_checkable
class HasKvMemory(Protocol):
    """An executor whose blocks can be kept elsewhere."""

    @property
    def kv_memory(self) -> KvMemory | None: ...
