"""`Decoder` on the native kernels: packs the weights, keeps the buffers, makes one call per step."""

import weakref
from collections.abc import Callable
from ctypes import pointer
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.collective.port import LOOPBACK, Collective, GroupLost
from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.formats import GROUP, WeightFormat
from services.worker.engine.kvcache import KvCache
from services.worker.engine.memory import Arena
from services.worker.engine.native import abi, build
from services.worker.engine.rope import rope_tables
from services.worker.engine.shards import ShardedFolder
from services.worker.engine.weights import LayerWeights
from services.worker.memory.served import (
    LOGITS_KEPT,
    native_buffer_bytes,
    native_matrix_bytes,
    native_weight_bytes,
    native_widths,
)
from services.worker.step import I32

PANEL = 16
_MAX_GROUP = 256
PHASES = (
    *("embed", "norm", "qkv", "rope and KV write", "attention", "out", "gate and up", "down", "head"),
    "exposed communication",
)
"""Kinds of work in a pass, as `src/pass.h` counts them; the last is none of a rank alone."""

ChunkPlan = Callable[[int], I32]
"""Tokens of a step → first token of each chunk, then the number of tokens."""


def one_chunk(tokens: int) -> I32:
    """`ChunkPlan` of a rank alone."""
    return np.array((0, tokens), np.int32)


class Kernels:
    """The loaded library and a team of `threads` that works for it. Raises `KernelsUnavailable`.

    One caller at a time: a team does one piece of work after the other.
    """

    def __init__(self, threads: int) -> None:
        self.library = abi.declare(build.load())
        self.team = self.library.hortator_muster(threads)
        if self.team is None:
            raise build.KernelsUnavailable(
                f"{threads} threads cannot be started; raise the limit of processes or use fewer --threads"
            )
        self.close = weakref.finalize(self, self.library.hortator_dismiss, self.team)
        """Ends the team's threads; nothing may be computed afterwards."""
        # A process may end within a step; its threads go with it, and nobody is left to wait for them.
        self.close.atexit = False

    def pack(
        self,
        weight: torch.Tensor,
        form: WeightFormat,
        bias: torch.Tensor | None = None,
        arena: Arena | None = None,
    ) -> "PackedMatrix":
        """`weight` [n, k] float32 and `bias` [n] in the kernels' layout, inside `arena` if given."""
        n, k = weight.shape
        own = arena or Arena(native_matrix_bytes(n, k, form.name, bias is not None))
        return PackedMatrix(self, weight, form, bias, own)

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """(all finite, index of the first maximum) of each row of `values`."""
        rows, size = values.shape
        finite, best = np.empty(rows, np.bool_), np.empty(rows, np.int64)
        stride = values.strides[0] // values.itemsize if rows > 1 else size
        to = finite.ctypes.data, best.ctypes.data
        self.library.hortator_scan(self.team, values.ctypes.data, rows, size, stride, *to)
        return finite, best

    def draw(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        """`services.worker.engine.draw.DrawRows`, rows side by side on the team's threads."""
        tokens = np.empty(len(draws), np.int64)
        stride = values.strides[0] // values.itemsize
        what = values.ctypes.data, values.shape[1], stride, draws.ctypes.data, len(draws)
        self.library.hortator_draw(self.team, *what, tokens.ctypes.data)
        return tokens.astype(np.int32)


class PackedMatrix:
    """Owns the memory an `abi.Matrix` points to."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        form: WeightFormat,
        bias: torch.Tensor | None,
        arena: Arena,
    ) -> None:
        n, k = weight.shape
        padded, inputs = round_up(n), round_up(k, form.alignment)
        weight = weight.contiguous()
        self.form = form
        self._inputs = k
        self._kernels = kernels
        self._panels = arena.take(padded * inputs * form.bytes, torch.uint8)
        self._bias = None if bias is None else arena.take(padded, torch.float32)
        if bias is not None and self._bias is not None:
            self._bias[:n] = bias
        self._scale = None if form.top is None else arena.take(padded, torch.float32)
        own = _address(self._bias), _address(self._scale)
        self.abi = abi.Matrix(self._panels.data_ptr(), *own, n, inputs, form.code)
        kernels.library.hortator_pack(kernels.team, weight.data_ptr(), k, self.abi)

    @property
    def bytes(self) -> int:
        return self._panels.nbytes

    def multiply(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """x [m, k] · wᵀ as [m, n rounded up to 16]; added to `into`, of that shape, if given."""
        m = len(x)
        out = torch.empty(m, round_up(self.abi.n)) if into is None else into
        codes = Codes(m, self.abi.k) if self.form.dynamic else None
        to = out.data_ptr(), int(into is not None), codes.abi if codes else abi.Codes()
        what = m, x.data_ptr(), self._inputs
        self._kernels.library.hortator_multiply(self._kernels.team, self.abi, *what, *to)
        return out


class Codes:
    """Memory for `rows` of at most `width` activations while they are quantised, in `arena` if given."""

    def __init__(self, rows: int, width: int, arena: Arena | None = None) -> None:
        groups = round_up(width, GROUP) // GROUP
        take = torch.empty if arena is None else arena.take
        # 12 bytes for each 8: beside the codes stands what the weights' offset adds to their products.
        self._runs = take(rows * groups * GROUP // 8 * 12, dtype=torch.int8)
        self._scales = take(rows * groups, dtype=torch.float32)
        self.abi = abi.Codes(self._runs.data_ptr(), self._scales.data_ptr())


def round_up(n: int, step: int = PANEL) -> int:
    return -(-n // step) * step


def why_not(config: ModelConfig, kv: KvCache) -> str | None:
    """Why the native kernels cannot compute this model, or None."""
    if config.hidden % PANEL or config.head_dim % PANEL:
        return f"hidden size {config.hidden} and head size {config.head_dim} must be multiples of {PANEL}"
    if kv.block_tokens & (kv.block_tokens - 1):
        return f"block size {kv.block_tokens} is not a power of two"
    if config.group > _MAX_GROUP:
        return f"{config.group} query heads per KV head"
    return None


class NativeDecoder:
    """`services.worker.engine.decoder.Decoder` in C++, of a whole model or of a rank's part of one.

    In a group, logits are those of the rank's own vocabulary rows, and `plan` says how a step is cut into
    chunks: the same on all ranks.
    """

    def __init__(
        self,
        kernels: Kernels,
        folder: ShardedFolder,
        form: WeightFormat,
        kv: KvCache,
        collective: Collective = LOOPBACK,
    ) -> None:
        c = self.config = folder.config
        self._kernels, self._form, self._kv, self._collective = kernels, form, kv, collective
        self.plan: ChunkPlan = one_chunk
        self._keep: list[object] = []
        out_bias = c.out_bias and folder.shard.rank == 0
        self._arena = Arena(native_weight_bytes(replace(c, out_bias=out_bias), form.name))
        layers = (abi.Layer * c.layers)(*(self._layer(w) for w in folder.layers()))
        embed = self._matrix(folder.embed())
        head = embed if c.tied else self._matrix(folder.head())
        cos, sin = rope_tables(c)
        self._groups = np.array(folder.layout.groups, np.int32)
        self._exchange = collective.exchange()
        self._model = abi.Model(
            hidden=c.hidden,
            intermediate=c.intermediate,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            layers=c.layers,
            block_tokens=kv.block_tokens,
            half_kv=int(kv.data.dtype == torch.float16),
            eps=c.norm_eps,
            cos=self._vector(cos),
            sin=self._vector(sin),
            layer=layers,
            embed=embed,
            head=head,
            norm=self._vector(folder.norm()),
            kv=kv.data.data_ptr(),
            team=kernels.team,
            groups=self._groups.ctypes.data,
            first_id=folder.shard.vocab.start,
            exchange=None if self._exchange is None else pointer(self._exchange),
        )
        self._spent = np.zeros(len(PHASES))
        self._logits = torch.empty(0, round_up(c.vocab_size))
        self._room = 0
        self._grow(64)

    @property
    def weights(self) -> Arena:
        """All that is read and never written."""
        return self._arena

    def reserve(self, tokens: int, logits: int) -> None:
        """Make room for steps of `tokens` tokens and logits of `logits` of them, and no more than that."""
        arena = Arena(native_buffer_bytes(self.config, self._form.name, tokens, logits))
        self._make_room(tokens, arena)
        width = self._logits.shape[1]
        self._logits = arena.take(logits * width, torch.float32).view(logits, width)

    @property
    def kernels(self) -> Kernels:
        """The team that computes."""
        return self._kernels

    def detail(self) -> dict[str, str]:
        return {"kernels": "native"}

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        return self._kernels.scan(values)

    def draw_rows(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        return self._kernels.draw(values, draws)

    def spent(self) -> dict[str, float]:
        """Seconds of every pass so far by kind of work."""
        known = len(PHASES) - (self._exchange is None)
        return dict(zip(PHASES[:known], self._spent.tolist()))

    def use(self, kernels: Kernels) -> None:
        """Compute with another team from now on."""
        self._kernels = kernels
        self._model.team = kernels.team

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """As `Decoder`; the logits are overwritten by the next call. Raises `GroupLost`."""
        if batch.size > self._room:
            self._grow(batch.size)
        logits = self._logits_of(len(batch.logit_tokens))
        chunks = self.plan(batch.size)
        view = self._view(batch, chunks)
        view.ids = batch.tokens.ctypes.data
        self._pass(view, logits)
        return logits[:, : self.config.vocab_size]

    def forward_layers(
        self, batch: RaggedBatch, first: int, stop: int, chunks: I32, embed: bool = False
    ) -> torch.Tensor:
        """Layers [first, stop) of a pass by themselves, for measurements. Raises `GroupLost`.

        The KV of `batch` is overwritten, and what enters the first layer is whatever the last pass left,
        unless tokens are looked up (`embed`). Results are logits if the last layer is one of them.
        """
        if batch.size > self._room:
            self._grow(batch.size)
        view = self._view(batch, chunks)
        view.first_layer, view.stop_layer = first, stop
        if embed:
            view.ids = batch.tokens.ctypes.data
        logits = self._logits_of(len(batch.logit_tokens))
        self._pass(view, logits)
        return logits[:, : self.config.vocab_size]

    def _view(self, batch: RaggedBatch, chunks: I32) -> abi.Batch:
        """`batch` as the kernels read it, all layers; valid as long as both arguments live."""
        return abi.Batch(
            tokens=batch.size,
            rows=batch.rows,
            table_width=batch.block_table.shape[1],
            logits=len(batch.logit_tokens),
            chunks=len(chunks) - 1,
            first_layer=0,
            stop_layer=self.config.layers,
            positions=batch.positions.ctypes.data,
            row_start=batch.row_start.ctypes.data,
            table=batch.block_table.ctypes.data,
            write_block=batch.write_block.ctypes.data,
            write_offset=batch.write_offset.ctypes.data,
            logit_tokens=batch.logit_tokens.ctypes.data,
            chunk_start=chunks.ctypes.data,
        )

    def _pass(self, view: abi.Batch, logits: torch.Tensor) -> None:
        out = logits.data_ptr(), self._spent.ctypes.data
        if self._kernels.library.hortator_forward(self._model, view, self._buffers, *out):
            self._collective.check()
            raise GroupLost("the group ended within a step")

    def _logits_of(self, rows: int) -> torch.Tensor:
        """Room for the logits of `rows` tokens. Kept between steps up to a size that only prompt logprobs
        exceed: fresh memory is mapped and zeroed page by page every time."""
        if rows <= len(self._logits):
            return self._logits[:rows]
        fresh = torch.empty(max(rows, min(2 * len(self._logits), LOGITS_KEPT)), self._logits.shape[1])
        if len(fresh) <= LOGITS_KEPT:
            self._logits = fresh
        return fresh[:rows]

    def _layer(self, w: LayerWeights) -> abi.Layer:
        return abi.Layer(
            input_norm=self._vector(w.input_norm),
            q_norm=self._vector(w.q_norm),
            k_norm=self._vector(w.k_norm),
            post_norm=self._vector(w.post_norm),
            qkv=self._matrix(w.qkv, w.qkv_bias),
            out=self._matrix(w.out, w.out_bias),
            gate_up=self._matrix(interleave(w.gate_up)),
            down=self._matrix(w.down),
        )

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> abi.Matrix:
        packed = self._kernels.pack(weight, self._form, bias, self._arena)
        self._keep.append(packed)
        return packed.abi

    def _vector(self, value: torch.Tensor | None) -> int | None:
        if value is None:
            return None
        own = self._arena.take(value.numel(), torch.float32)
        own.copy_(value.view(-1))
        self._keep.append(own)
        return own.data_ptr()

    def _grow(self, tokens: int) -> None:
        """Make room for steps of `tokens` tokens; doubled, so that it happens a few times in a life."""
        tokens = max(tokens, 2 * self._room)
        self._make_room(tokens, Arena(native_buffer_bytes(self.config, self._form.name, tokens, 0)))

    def _make_room(self, tokens: int, arena: Arena) -> None:
        widths = native_widths(self.config)
        self._room = tokens
        self._memory = [arena.take(tokens * width, torch.float32) for width in widths]
        self._codes = Codes(tokens, max(widths), arena) if self._form.dynamic else None
        codes = self._codes.abi if self._codes else abi.Codes()
        self._buffers = abi.Buffers(*(m.data_ptr() for m in self._memory), codes)


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of gate then up → panels of 16 rows of gate and up in turn, each padded with zero rows."""
    half, k = len(gate_up) // 2, gate_up.shape[1]
    panels = round_up(half) // PANEL
    both = torch.zeros(2, panels * PANEL, k)
    both[0, :half], both[1, :half] = gate_up[:half], gate_up[half:]
    return both.view(2, panels, PANEL, k).transpose(0, 1).reshape(-1, k)


def _address(value: torch.Tensor | None) -> int | None:
    return None if value is None else value.data_ptr()
