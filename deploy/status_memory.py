"""What `hortator status` says of an instance's memory, in lines for people."""

from typing import Any

from services.worker.memory.ledger import CLASSES, size, word


def memory_lines(instance: str, memory: dict[str, Any]) -> list[str]:
    """The ledger over all ranks, with what was predicted where it differs in print; then what differs by more
    than 3 %. None of an instance that keeps no account."""
    if not memory:
        return []
    predicted, measured = memory["predicted"], memory["measured"]
    ranks = f" of {len(memory['ranks'])} ranks" if len(memory["ranks"]) > 1 else ""
    free = f"; {size(memory['free_bytes'])} {memory['free_of']}" if "free_bytes" in memory else ""
    if measured is None:
        whole = _classes(predicted, predicted)
        return [f"{instance}: memory{ranks}: {whole} predicted, the system does not tell what it is{free}"]
    lines = [f"{instance}: memory{ranks}: {_classes(measured, predicted)}{free}"]
    if len(memory["ranks"]) > 1:
        each = ", ".join(f"{n}: {size(rank['measured']['total_bytes'])}" for n, rank in _measured(memory))
        lines.append(f"{instance}: memory by rank: {each}")
    return lines + [f"{instance}: memory was predicted wrongly: {text}" for text in memory["warnings"]]


def _measured(memory: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [(n, rank) for n, rank in enumerate(memory["ranks"]) if rank["measured"]]


def _classes(measured: dict[str, int], predicted: dict[str, int]) -> str:
    """`858.5 MiB (predicted 857.8 MiB) = weights 258.6 MiB + …`"""
    parts = [f"{word(name)} {_both(measured[name], predicted[name])}" for name in CLASSES if measured[name]]
    return f"{_both(measured['total_bytes'], predicted['total_bytes'])} = {' + '.join(parts)}"


def _both(measured: int, predicted: int) -> str:
    same = size(measured) == size(predicted)
    return size(measured) if same else f"{size(measured)} (predicted {size(predicted)})"
