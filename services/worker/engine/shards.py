"""One rank's slices of a model folder: read from the mapped files, never more than the rank needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from services.worker.engine.config import ModelConfig
from services.worker.engine.weights import LayerWeights, ModelFolder
from services.worker.parallel.split import Shard, Span, plan_shards

_GATED = ("gate", "up")


@dataclass(frozen=True)
class HeadLayout:
    """How a rank's query heads lie in its matrices: those of one KV head side by side."""

    groups: tuple[int, ...]
    """Query heads of each KV head."""
    width: int | None = None
    """Room for each KV head's query heads where all need the same, heads of zeros filling it up: they attend
    to everything evenly, and the columns that take their results are zero. None: no filling."""

    @property
    def heads(self) -> int:
        return sum(self.groups) if self.width is None else self.width * len(self.groups)

    @property
    def even(self) -> bool:
        return self.width is not None or len(set(self.groups)) == 1


class ShardedFolder:
    """`ModelFolder` as one rank sees it: `config` has its numbers of heads, channels and vocabulary rows.

    `whole` is the model's own configuration. With `filled`, each KV head has as many query heads as the
    widest (`HeadLayout.width`), so that code which knows one number for all computes uneven splits too.
    Biases that are added once for the group are those of rank 0; on others they are None. `check` is called
    before each layer is read, and raises where nobody needs it any more.
    """

    def __init__(
        self, folder: ModelFolder, shard: Shard, filled: bool, check: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self.shard, self._check = folder, shard, check
        self.whole = w = folder.config
        self.layout = HeadLayout(shard.groups, max(shard.groups) if filled else None)
        self.config: ModelConfig = replace(
            w,
            heads=self.layout.heads,
            kv_heads=shard.kv_heads.size,
            intermediate=shard.ffn.size,
            vocab_size=shard.vocab.size,
        )
        dim = w.head_dim
        self._q = Span(shard.heads.start * dim, shard.heads.stop * dim)
        self._kv = Span(shard.kv_heads.start * dim, shard.kv_heads.stop * dim)

    def embed(self) -> torch.Tensor:
        """[own vocabulary rows, hidden]."""
        return self._rows("model.embed_tokens.weight", self.shard.vocab)

    def head(self) -> torch.Tensor:
        """As `embed`; the same values where the model ties them."""
        return self.embed() if self.whole.tied else self._rows("lm_head.weight", self.shard.vocab)

    def norm(self) -> torch.Tensor:
        return self._folder.tensor("model.norm.weight")

    def layers(self) -> Iterator[LayerWeights]:
        """As `ModelFolder.layers`; the columns of `out` and `down` are the rank's, too."""
        c, tensor = self.whole, self._folder.tensor
        for i in range(c.layers):
            self._check()
            p = f"model.layers.{i}."
            attn, mlp = p + "self_attn.", p + "mlp."
            yield LayerWeights(
                input_norm=tensor(p + "input_layernorm.weight"),
                qkv=self._qkv(attn, "weight"),
                qkv_bias=self._qkv(attn, "bias") if c.qkv_bias else None,
                q_norm=tensor(attn + "q_norm.weight") if c.qk_norm else None,
                k_norm=tensor(attn + "k_norm.weight") if c.qk_norm else None,
                out=self._fill(self._columns(attn + "o_proj.weight", self._q).T).T.contiguous(),
                out_bias=tensor(attn + "o_proj.bias") if c.out_bias and self.shard.rank == 0 else None,
                post_norm=tensor(p + "post_attention_layernorm.weight"),
                gate_up=torch.cat(
                    [self._rows(f"{mlp}{n}_proj.weight", self.shard.ffn) for n in ("gate", "up")]
                ),
                down=self._columns(mlp + "down_proj.weight", self.shard.ffn),
            )

    def fingerprint(self, dtype: str, kv_dtype: str) -> str:
        """That of the model, and of the split: ranks' KV is only their own."""
        found = self._folder.fingerprint(dtype, kv_dtype)
        return found if self.shard.whole else f"{found}-tp{self.shard.size}"

    def close(self) -> None:
        self._folder.close()

    def _qkv(self, attn: str, what: str) -> torch.Tensor:
        q = self._fill(self._rows(f"{attn}q_proj.{what}", self._q))
        return torch.cat([q, *(self._rows(f"{attn}{n}_proj.{what}", self._kv) for n in "kv")])

    def _fill(self, q: torch.Tensor) -> torch.Tensor:
        """Rows of query heads with zero rows for those that fill up the narrower KV heads."""
        width, dim = self.layout.width, self.whole.head_dim
        if width is None:
            return q
        filled = q.new_zeros(len(self.layout.groups), width, dim, *q.shape[1:])
        heads = q.reshape(-1, dim, *q.shape[1:])
        begin = 0
        for kv_head, group in enumerate(self.layout.groups):
            filled[kv_head, :group] = heads[begin : begin + group]
            begin += group
        return filled.reshape(-1, *q.shape[1:])

    def _rows(self, name: str, span: Span) -> torch.Tensor:
        return self._folder.part(name, 0, span.start, span.stop)

    def _columns(self, name: str, span: Span) -> torch.Tensor:
        return self._folder.part(name, 1, span.start, span.stop)


def shard_of(
    folder: ModelFolder,
    rank: int = 0,
    size: int = 1,
    filled: bool = False,
    check: Callable[[], None] = lambda: None,
) -> ShardedFolder:
    """The part of `folder` that `rank` of `size` holds. Raises ValueError where it cannot be split so."""
    return ShardedFolder(folder, plan_shards(folder.config, size).shards[rank], filled, check)


def filled_shard(folder: ModelFolder | ShardedFolder) -> ShardedFolder:
    """`folder` for code that knows one number of query heads per KV head. Raises ValueError for a rank's part
    in which they differ."""
    if isinstance(folder, ModelFolder):
        return shard_of(folder, filled=True)
    if not folder.layout.even:
        raise ValueError(f"KV heads have {folder.layout.groups} query heads: make the shard `filled`")
    return folder
