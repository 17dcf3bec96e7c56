"""What steps of the default model cost, as the native kernels of a small machine compute it."""

from types import SimpleNamespace

from services.worker.parallel.crossover import Line
from services.worker.parallel.overlap import Costs, Link, Work
from services.worker.parallel.split import plan_shards

SMOLLM = SimpleNamespace(
    heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab_size=49152, layers=30
)
GIGABIT, QUARTER, MEMORY = Line(60e-6, 8e-9), Line(60e-6, 32e-9), Line(3e-6, 0.1e-9)


def smollm(line: Line, ranks: int = 2) -> Costs:
    """Of the busiest of `ranks` ranks, whose sums take `line`."""
    shards = plan_shards(SMOLLM, ranks).shards
    attend = max((2 * shard.heads.size + 2 * shard.kv_heads.size) * 64 for shard in shards)
    feed = max(3 * shard.ffn.size for shard in shards)
    return Costs(30, _work(576 * attend), _work(576 * feed), Link.of(line), 576 * 4, 4e-6)


def _work(weights: int) -> Work:
    """56 ps for each weight and row, and at least 190 ps for each weight."""
    return Work(2e-6, 56e-12 * weights, 190e-12 * weights)
