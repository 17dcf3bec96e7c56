"""The forward pass in plain torch: the reference every faster path is tested against, and the fallback."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.worker.collective.port import LOOPBACK, Collective
from services.worker.collective.tensors import HostReducer
from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.device import Device, Linear
from services.worker.engine.draw import draw_rows
from services.worker.engine.invariant import EachTokenAlone, Rowwise, at_once, by_tiles, check_places
from services.worker.engine.kvcache import KvCache
from services.worker.engine.native.decoder import PHASES
from services.worker.engine.rope import rope_tables
from services.worker.engine.sampler import scan_rows
from services.worker.engine.shards import ShardedFolder, filled_shard
from services.worker.engine.weights import LayerWeights, ModelFolder
from services.worker.parallel.split import Span
from services.worker.step import I32


class Decoder(Protocol):
    """Computes a ragged batch, writing the KV of its tokens into the cache."""

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [len(batch.logit_tokens), vocabulary rows of this rank], float32. Raises `GroupLost`."""
        ...

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """`sampler.Scan` of logits, as fast as this path can."""
        ...

    def draw_rows(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        """`draw.DrawRows` of logits, as fast as this path can."""
        ...

    def detail(self) -> dict[str, str]:
        """For people: which kernels were chosen and why."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A decoder that knows where its time goes."""

    def spent(self) -> dict[str, float]:
        """Seconds of every pass so far by kind of work."""
        ...


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchDecoder:
    """`Decoder` on any torch device, of a whole model or of a rank's part of one (`filled`).

    With `deterministic`, on CPUs, a token's logits depend on its own history alone, to the last bit, as long
    as the number of threads stays the same. That costs time, most of it in prompts. Raises ValueError where
    torch cannot do that.
    """

    def __init__(
        self,
        folder: ModelFolder | ShardedFolder,
        device: Device,
        kv: KvCache,
        deterministic: bool = False,
        collective: Collective = LOOPBACK,
    ) -> None:
        folder = filled_shard(folder)
        self.config = folder.config
        self._vocab, self._sums = folder.shard.vocab, HostReducer(collective)
        self._alone = deterministic
        self._by_token = by_tiles if deterministic else at_once
        self._device = device
        self._kv = kv
        embed = folder.embed()
        head = embed if self.config.tied else folder.head()
        self._embed = device.embedding(embed)
        self._head = device.linear(head, None)
        self._norm = device.tensor(folder.norm())
        self._layers = [self._load(layer) for layer in folder.layers()]
        cos, sin = rope_tables(self.config)
        self._cos, self._sin = device.tensor(cos), device.tensor(sin)
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last = 0.0
        if deterministic:
            check_places(self.forward, kv)

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        return scan_rows(values)

    def draw_rows(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        return draw_rows(values, draws)

    def detail(self) -> dict[str, str]:
        return {"kernels": "torch"}

    def spent(self) -> dict[str, float]:
        """As `Timed`. On a device that works behind our back: the time to tell it what to do."""
        known = len(PHASES) - (self._sums.size == 1)
        return {phase: self._spent[phase] for phase in PHASES[:known]}

    def _tick(self, phase: str) -> None:
        """Everything since the last call was `phase`."""
        now = time.perf_counter()
        self._spent[phase] += now - self._last
        self._last = now

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        c, d = self.config, self._device
        self._last = time.perf_counter()
        positions = d.index(batch.positions)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        write = d.index(batch.write_block), d.index(batch.write_offset)
        # What the block's last owner left may be no number, and what is masked is multiplied all the same.
        self._kv.data[d.index(batch.write_block[batch.write_offset == 0])] = 0.0
        attend = EachTokenAlone(c, self._kv, batch) if self._alone else self._attention(batch)
        by_token = self._by_token
        x = self._embedded(d.index(batch.tokens))
        self._tick("embed")
        x = self._summed(x)
        for i, layer in enumerate(self._layers):
            normed = by_token(_norm(layer.input_norm, c.norm_eps), x)
            self._tick("norm")
            qkv = by_token(layer.qkv, normed)
            self._tick("qkv")
            q, k, v = qkv.split((c.q_size, c.kv_size, c.kv_size), dim=-1)
            q = q.view(-1, c.heads, c.head_dim)
            k = k.view(-1, c.kv_heads, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = by_token(_norm(layer.q_norm, c.norm_eps), q)
                k = by_token(_norm(layer.k_norm, c.norm_eps), k)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self._kv.data[write[0], i, 0, :, write[1]] = k.to(self._kv.data.dtype)
            self._kv.data[write[0], i, 1, :, write[1]] = v.view(k.shape).to(self._kv.data.dtype)
            self._tick("rope and KV write")
            attended = attend(i, q).reshape(-1, c.q_size)
            self._tick("attention")
            if i + 1 == c.layers:
                # Of other tokens only keys and values are ever read.
                wanted = d.index(batch.logit_tokens)
                x, attended = x[wanted], attended[wanted]
            part = by_token(layer.out, attended)
            self._tick("out")
            x = x + self._summed(part)
            normed = by_token(_norm(layer.post_norm, c.norm_eps), x)
            self._tick("norm")
            act = by_token(_gated(layer.gate_up), normed)
            self._tick("gate and up")
            part = by_token(layer.down, act)
            self._tick("down")
            x = x + self._summed(part)
        normed = by_token(_norm(self._norm, c.norm_eps), x)
        self._tick("norm")
        logits = by_token(self._head, normed)
        self._tick("head")
        return logits

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]: this rank's part, zeros for ids of others."""
        if self._sums.size == 1:
            return self._embed[ids]
        return own_rows(self._embed, ids, self._vocab)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in their memory."""
        if self._sums.size > 1:
            self._sums.all_reduce(part)
            self._tick("exposed communication")
        return part

    def _load(self, w: LayerWeights) -> _Layer:
        d = self._device
        return _Layer(
            input_norm=d.tensor(w.input_norm),
            qkv=d.linear(w.qkv, w.qkv_bias),
            q_norm=None if w.q_norm is None else d.tensor(w.q_norm),
            k_norm=None if w.k_norm is None else d.tensor(w.k_norm),
            out=d.linear(w.out, w.out_bias),
            post_norm=d.tensor(w.post_norm),
            gate_up=d.linear(w.gate_up, None),
            down=d.linear(w.down, None),
        )

    def _attention(self, batch: RaggedBatch) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """(layer, q [T, heads, head_dim]) → [T, heads, head_dim], for this batch.

        Rows of one token are done together, padded to the longest; every other row by itself.
        """
        counts = batch.row_start[1:] - batch.row_start[:-1]
        single = [r for r in range(batch.rows) if counts[r] == 1]
        parts = [self._group(batch, single, 1)] if single else []
        parts += [self._group(batch, [r], int(counts[r])) for r in range(batch.rows) if counts[r] > 1]

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            result = torch.empty_like(q)
            for part in parts:
                result[part.tokens] = part.attend(layer, q)
            return result

        return attend

    def _group(self, batch: RaggedBatch, rows: list[int], count: int) -> "_AttentionGroup":
        return _AttentionGroup(self.config, self._device, self._kv, batch, rows, count)


class _AttentionGroup:
    """Attention of rows with equally many new tokens over their paged prefix and themselves."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        kv: KvCache,
        batch: RaggedBatch,
        rows: list[int],
        count: int,
    ) -> None:
        self._config, self._kv, self._count = config, kv, count
        lengths = batch.kv_len[rows]
        width = -(-int(lengths.max()) // kv.block_tokens)
        self.tokens = device.index(batch.row_start[rows]).repeat_interleave(count)
        self.tokens += torch.arange(count, device=device.torch).repeat(len(rows))
        # Index into kv.rows of (row, head, block) at layer 0, k. Tables are -1 behind a row's end: block 0 is
        # read there and masked.
        blocks = device.index(batch.block_table[rows, :width].clip(min=0))
        heads = torch.arange(config.kv_heads, device=device.torch)
        per_layer = 2 * config.kv_heads
        index = blocks[:, None, :] * (config.layers * per_layer) + heads[None, :, None]
        self._index = index.reshape(-1)
        self._shape = (len(rows), config.kv_heads, width * kv.block_tokens, config.head_dim)
        last = device.index(lengths)[:, None] - count + torch.arange(count, device=device.torch)
        visible = torch.arange(self._shape[2], device=device.torch) <= last[..., None]
        # [rows, 1, group × count, length]: query heads of one KV head stand side by side as queries.
        self._mask = visible[:, None].repeat(1, 1, config.group, 1)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        c, n = self._config, self._shape[0]
        base = self._index + layer * 2 * c.kv_heads
        keys = self._kv.rows.index_select(0, base).view(self._shape).float()
        values = self._kv.rows.index_select(0, base + c.kv_heads).view(self._shape).float()
        queries = q[self.tokens].view(n, self._count, c.kv_heads, c.group, c.head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(n, c.kv_heads, c.group * self._count, c.head_dim)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask, scale=1 / math.sqrt(c.head_dim)
        )
        out = out.view(n, c.kv_heads, c.group, self._count, c.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n * self._count, c.heads, c.head_dim)


def own_rows(embed: torch.Tensor, ids: torch.Tensor, vocab: Span) -> torch.Tensor:
    """Rows of `embed`, which holds those of `vocab`, for `ids` of the whole vocabulary; zeros for others."""
    row = ids - vocab.start
    own = (row >= 0) & (row < vocab.size)
    # Chosen, not multiplied: another rank's id must not bring in what is no number here.
    return torch.where(own[:, None], embed[row.clamp(0, vocab.size - 1)], 0.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) · weight over the last dimension, float32."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _norm(weight: torch.Tensor, eps: float) -> Rowwise:
    return lambda x: rms_norm(x, weight, eps)


def _gated(gate_up: Linear) -> Rowwise:
    def work(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return F.silu(gate) * up

    return work


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]; cos and sin are [tokens, 1, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
