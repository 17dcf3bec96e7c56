"""Which part of a model each rank of a tensor-parallel group holds (Megatron's split; design §7).

Query heads are dealt out in contiguous runs as even as possible, and a rank holds every KV head its queries
read: where a run cuts through the group of a KV head, both ranks hold that one. Channels of the feed-forward
layer and rows of the vocabulary are dealt out in panels, so that every rank multiplies whole panels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

PANEL = 16
"""Channels and vocabulary rows are dealt out in units of this many; the last unit may be smaller."""


class Sizes(Protocol):
    """What of a model's configuration the split depends on."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class Span:
    """Indices [start, stop) of the whole model."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """What one rank holds of every layer, and of the vocabulary."""

    rank: int
    size: int
    heads: Span
    """Query heads."""
    kv_heads: Span
    """KV heads that these queries read; the first and last may also be held by a neighbour."""
    groups: tuple[int, ...]
    """Query heads held here of each KV head held here."""
    ffn: Span
    vocab: Span

    @property
    def whole(self) -> bool:
        return self.size == 1


@dataclass(frozen=True)
class ShardPlan:
    """The shards of all ranks, and what the split costs beyond an even one."""

    shards: tuple[Shard, ...]
    imbalance: float
    """Weights a pass multiplies with on the busiest rank, over the mean of all ranks: 1 is even."""
    kv_replication: float
    """KV heads held by all ranks together, over those of the model."""

    @property
    def size(self) -> int:
        return len(self.shards)

    def describe(self) -> str:
        """One line for people: heads of each rank, imbalance, replication."""
        heads = "/".join(str(shard.heads.size) for shard in self.shards)
        return (
            f"query heads {heads}, busiest rank {self.imbalance:.3f} of the mean, "
            f"KV heads held {self.kv_replication:.2f} times"
        )


def plan_shards(model: Sizes, size: int) -> ShardPlan:
    """Split `model` over `size` ranks. Raises ValueError, saying what is too small, where it cannot be."""
    if size < 1:
        raise ValueError(f"--tp {size}: a group has at least one rank")
    for what, units in (
        ("query heads", model.heads),
        (f"panels of {PANEL} feed-forward channels", -(-model.intermediate // PANEL)),
        (f"panels of {PANEL} vocabulary rows", -(-model.vocab_size // PANEL)),
    ):
        if size > units:
            raise ValueError(f"--tp {size}: only {units} {what} for as many ranks; lower --tp")
    group = model.heads // model.kv_heads
    shards = []
    for rank, (heads, ffn, vocab) in enumerate(
        zip(
            deal(model.heads, size),
            _panels(model.intermediate, size),
            _panels(model.vocab_size, size),
        )
    ):
        kv = Span(heads.start // group, -(-heads.stop // group))
        groups = tuple(
            min(heads.stop, (head + 1) * group) - max(heads.start, head * group)
            for head in range(kv.start, kv.stop)
        )
        shards.append(Shard(rank, size, heads, kv, groups, ffn, vocab))
    work = [weights_of(model, shard) for shard in shards]
    held = sum(shard.kv_heads.size for shard in shards)
    return ShardPlan(tuple(shards), max(work) * size / sum(work), held / model.kv_heads)


def weights_of(model: Sizes, shard: Shard) -> int:
    """Weights of matrices a pass of one token multiplies with on this rank, the head included."""
    qkv = (shard.heads.size + 2 * shard.kv_heads.size) * model.head_dim
    layer = model.hidden * (qkv + shard.heads.size * model.head_dim + 3 * shard.ffn.size)
    return model.layers * layer + model.hidden * shard.vocab.size


def deal(count: int, size: int) -> Sequence[Span]:
    """`count` things in `size` contiguous runs, none more than one longer than another; the longer first."""
    share, more = divmod(count, size)
    starts = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [Span(a, b) for a, b in pairwise(starts)]


def _panels(count: int, size: int) -> Sequence[Span]:
    runs = deal(-(-count // PANEL), size)
    return [Span(run.start * PANEL, min(run.stop * PANEL, count)) for run in runs]
