"""The forward pass on a CUDA device; decode steps are replayed from captured graphs.

Matrices, what they multiply, attention and what ranks of a group add up are in the weights' dtype; the
residual stream, norms, rotation and logits in float32.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.worker.collective.tensors import Reducer
from services.worker.engine.batch import RaggedBatch
from services.worker.engine.cuda.attention import Attend, choose_attention
from services.worker.engine.cuda.chunks import cut_batch
from services.worker.engine.cuda.draw import OnTheWay, PlainDraw, PlainDraws, draw_plain, draw_split, upload
from services.worker.engine.cuda.inputs import (
    BUCKETS,
    StepInputs,
    bucket_of,
    idle_decode,
    pack,
    packed_size,
    pad_decode,
    unpack,
)
from services.worker.engine.cuda.sums import Aside, Begin, Landing, alone, in_order
from services.worker.engine.decoder import own_rows, rotate
from services.worker.engine.draw import draw_rows
from services.worker.engine.kvcache import KvCache
from services.worker.engine.native.decoder import ChunkPlan, one_chunk
from services.worker.engine.rope import rope_tables
from services.worker.engine.sampler import scan_rows
from services.worker.engine.shards import ShardedFolder, filled_shard
from services.worker.engine.weights import LayerWeights, ModelFolder
from services.worker.step import I32, SlotArrays, StepInput

FED_SLOTS = 4096
"""Slots whose last token is kept on the device."""


class Group(Protocol):
    """What there is to know of the ranks whose devices add up: `services.worker.engine.cuda.group`."""

    def check(self) -> None:
        """Raise `GroupLost` if the group is lost."""
        ...

    def detail(self) -> dict[str, str]:
        """For people."""
        ...


class _Chunk:
    """Tokens of a step on their way through the layers, and what of theirs is on its way to other ranks."""

    def __init__(self, inputs: StepInputs, attend: Attend, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.inputs, self.attend, self.cos, self.sin = inputs, attend, cos, sin
        self._x: torch.Tensor | None = None
        self._landing: Landing | None = None

    def sends(self, landing: Landing) -> None:
        """What lands is to be added to the residual stream."""
        self._landing = landing

    def land(self) -> torch.Tensor:
        """The residual stream [tokens, hidden], float32, complete."""
        if self._landing is not None:
            part, self._landing = self._landing(), None
            self._x = part.float() if self._x is None else self._x + part
        assert self._x is not None
        return self._x

    def keep(self, x: torch.Tensor) -> None:
        """Go on with these tokens of it only."""
        self._x = x


class CudaDecoder:
    """`services.worker.engine.decoder.Decoder` in float32, float16 or bfloat16, of a whole model or of a
    rank's part of one (`filled`).

    The last block of `kv` belongs to no sequence. A token id of -1 - s in a batch stands for the token drawn
    last for slot s by `draw`, which the device takes from its own memory: a step can be handed over before
    the tokens of the one before have reached the host (docs/gpu.md). On a CPU the same code runs, nothing
    captured.

    In a group, parts of sums go by `reducer`, and `plan` says how a step is cut into chunks whose sums travel
    while others are computed: the same on all ranks. Steps replayed from graphs are one chunk.
    """

    def __init__(
        self,
        folder: ModelFolder | ShardedFolder,
        kv: KvCache,
        dtype: torch.dtype,
        graphs: bool = True,
        reducer: Reducer | None = None,
    ) -> None:
        folder = filled_shard(folder)
        c = self.config = folder.config
        self._vocab = folder.shard.vocab
        self.plan: ChunkPlan = one_chunk
        self._kv, self._dtype = kv, dtype
        self._device = kv.data.device
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            # Captures, and streams not named, are of the thread's current device.
            torch.cuda.set_device(self._device)
        self._scratch = kv.blocks
        if len(kv.data) <= kv.blocks:
            raise ValueError(f"KV of {len(kv.data)} blocks, all of them sequences': one more is needed")
        if folder.shard.size != (1 if reducer is None else reducer.size):
            raise ValueError(f"a part of a model split {folder.shard.size} ways needs as many ranks")
        self._reducer = reducer
        if self._cuda and reducer is not None and not reducer.queues:
            graphs = False
        self._group: Group | None = None
        self._in_order: Begin = alone if reducer is None else in_order(reducer)
        self._aside = Aside(reducer, self._device) if reducer is not None and self._cuda else self._in_order
        before = torch.cuda.memory_allocated(self._device) if self._cuda else 0
        self._embed = self._matrix(folder.embed())
        self._head = self._embed if c.tied else self._matrix(folder.head())
        self._norm = self._vector(folder.norm())
        self._layers = [self._load(layer) for layer in folder.layers()]
        self._cos, self._sin = map(self._vector, rope_tables(c))
        self.weights_allocated = torch.cuda.memory_allocated(self._device) - before if self._cuda else 0
        """Bytes the allocator gave for all that is read and never written."""
        self._last = torch.zeros(FED_SLOTS, dtype=torch.int64, device=self._device)
        self._attention, self._reason = choose_attention(c, kv, dtype, self._scratch)
        self._plans = PlainDraws()
        self._graphs: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self.captures = graphs
        """Whether decode steps are replayed from graphs."""
        most = self._attention.width(-(-c.max_len // kv.block_tokens))
        size = packed_size(BUCKETS[-1], most)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._logits = torch.zeros(BUCKETS[-1], c.vocab_size, device=self._device)
        if self._cuda and graphs:
            self._warm()

    def detail(self) -> dict[str, str]:
        why = f" ({self._reason})" if self._reason else ""
        graphs = f"decode steps of up to {BUCKETS[-1]} rows" if self.captures else "off"
        own = {"kernels": "cuda", "attention": self._attention.name + why, "graphs": graphs}
        return own | ({} if self._group is None else self._group.detail())

    def joins(self, group: Group) -> None:
        """Nobody waits for the device any longer once `group` is lost, and it is told of in `detail`."""
        self._group = group

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        return scan_rows(values)

    def draw_rows(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        return draw_rows(values, draws)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """As `Decoder`, on the device; the next call overwrites them."""
        rows = bucket_of(batch) if self.captures else None
        if rows is None:
            batches = cut_batch(batch, self.plan(batch.size))
            return self._chunked(batches, self._in_order if len(batches) == 1 else self._aside)
        logits = self._replay(batch, rows)
        wanted = batch.logit_tokens
        if len(wanted) == batch.rows:
            return logits[: batch.rows]
        return logits[upload(torch.from_numpy(wanted.astype(np.int64)), self._device)]

    def forward_unsummed(self, batch: RaggedBatch) -> None:
        """A pass in one chunk that keeps its sums to itself: what computing takes. Its results are none."""
        self._chunked([batch], alone)

    @property
    def message_bytes(self) -> int:
        """Of each number of a sum."""
        return self._dtype.itemsize

    def begin_draw(self, logits: torch.Tensor, step: StepInput, slots: SlotArrays) -> OnTheWay | None:
        """Tokens of the step's sampling rows, drawn here; None if some row's sampling needs the host.

        `logits` are those of the step, no more.
        """
        plan = self._plans.of(step, slots)
        return None if plan is None else self.bring(self.draw(logits, plan))

    def bring(self, value: torch.Tensor) -> OnTheWay:
        """`value` on its way to the host; waiting for it ends with `GroupLost` if the group is lost."""
        return OnTheWay(value, None if self._group is None else self._group.check)

    def draw(self, logits: torch.Tensor, plan: PlainDraw) -> torch.Tensor:
        """The tokens of `draw_plain`, on the device; each rank's remembers them as each slot's last."""
        if plan.slots.max() >= FED_SLOTS:
            raise ValueError(f"slot {plan.slots.max()}: a CUDA device holds {FED_SLOTS}; lower --max-slots")
        if self._reducer is None:
            tokens = draw_plain(logits, plan)
        else:
            tokens = draw_split(logits, plan, self._vocab.start, self._reducer)
        slots = upload(torch.from_numpy(plan.slots.astype(np.int64)), self._device)
        self._last[slots] = tokens.clamp(min=0)
        return tokens

    def _warm(self) -> None:
        """Capture every size with the narrowest table; wider ones (SDPA only) follow when first met."""
        with torch.inference_mode():
            for rows in BUCKETS:
                self._replay(idle_decode(rows, 1, self._scratch), rows)

    def _replay(self, batch: RaggedBatch, rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of a decode step, by its graph."""
        blocks = -(-int(batch.kv_len.max(initial=1)) // self._kv.block_tokens)
        width = self._attention.width(blocks)
        padded = pad_decode(batch, rows, max(width, blocks), self._scratch)
        self._attention.plan(padded, fixed=True)
        if not width:
            padded = pad_decode(batch, rows, 0, self._scratch)
        flat = self._inputs[: packed_size(rows, width)]
        flat.copy_(pack(padded, self._cuda), non_blocking=True)
        key = rows, width
        if key not in self._graphs:
            self._graphs[key] = self._capture(lambda: self._fixed_pass(flat, padded))
        return self._graphs[key]()

    def _capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if not self._cuda:
            return run
        # Libraries set themselves up at first use, which a capture must not see.
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Of a group, a thread of torch's looks after communication meanwhile.
        mode = "global" if self._reducer is None else "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def _fixed_pass(self, flat: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        inputs = unpack(flat, batch)
        logits = self._pass([self._chunk(inputs, self._attention.begin(inputs))], self._in_order)
        return self._logits[: batch.rows].copy_(logits)

    def _chunked(self, batches: Sequence[RaggedBatch], begin: Begin) -> torch.Tensor:
        chunks = []
        for place, batch in enumerate(batches):
            self._attention.plan(batch, fixed=False, place=place)
            inputs = unpack(pack(batch, self._cuda).to(self._device, non_blocking=True), batch)
            chunks.append(self._chunk(inputs, self._attention.begin(inputs)))
        return self._pass(chunks, begin)

    def _chunk(self, inputs: StepInputs, attend: Attend) -> _Chunk:
        at = inputs.positions
        return _Chunk(inputs, attend, self._cos[at][:, None], self._sin[at][:, None])

    def _pass(self, chunks: Sequence[_Chunk], begin: Begin) -> torch.Tensor:
        """Stage by stage, each chunk's as soon as its sum of the stage before has landed."""
        for chunk in chunks:
            chunk.sends(begin(self._embedded(chunk.inputs.tokens)))
        for i, w in enumerate(self._layers):
            for chunk in chunks:
                x = chunk.land()
                attended = self._attended(i, w, chunk, x)
                if i + 1 == self.config.layers:
                    # Of other tokens only keys and values are ever read.
                    wanted = chunk.inputs.logit_tokens
                    attended = attended[wanted]
                    chunk.keep(x[wanted])
                if len(attended):
                    chunk.sends(begin(F.linear(attended, w.out, w.out_bias)))
            for chunk in chunks:
                x = chunk.land()
                if len(x):
                    gate, up = F.linear(self._normed(x, w.post_norm), w.gate_up).chunk(2, dim=-1)
                    chunk.sends(begin(F.linear(F.silu(gate) * up, w.down)))
        rows = [x for x in (chunk.land() for chunk in chunks) if len(x)]
        if not rows:
            return self._logits[:0]
        x = rows[0] if len(rows) == 1 else torch.cat(rows)
        return self._vocabulary(self._normed(x, self._norm))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] in the weights' dtype: this rank's part, zeros for ids of others."""
        fed = self._last[(-1 - tokens).clamp(min=0)]
        ids = torch.where(tokens < 0, fed, tokens)
        return self._embed[ids] if self._reducer is None else own_rows(self._embed, ids, self._vocab)

    def _attended(self, layer: int, w: LayerWeights, chunk: _Chunk, x: torch.Tensor) -> torch.Tensor:
        """What this rank's heads make of the residual stream [tokens, q_size]; keys and values are kept."""
        c, block, offset = self.config, chunk.inputs.write_block, chunk.inputs.write_offset
        qkv = F.linear(self._normed(x, w.input_norm), w.qkv, w.qkv_bias)
        q, k, v = qkv.split((c.q_size, c.kv_size, c.kv_size), dim=-1)
        q = q.view(-1, c.heads, c.head_dim)
        k = k.view(-1, c.kv_heads, c.head_dim)
        v = v.view(k.shape)
        if w.q_norm is not None and w.k_norm is not None:
            q = F.rms_norm(q.float(), (c.head_dim,), w.q_norm, c.norm_eps)
            k = F.rms_norm(k.float(), (c.head_dim,), w.k_norm, c.norm_eps)
        q, k = rotate(q, chunk.cos, chunk.sin).to(self._dtype), rotate(k, chunk.cos, chunk.sin)
        self._kv.data[block, layer, 0, :, offset] = k.to(self._kv.data.dtype)
        self._kv.data[block, layer, 1, :, offset] = v.to(self._kv.data.dtype)
        return chunk.attend(layer, q).reshape(-1, c.q_size)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.norm_eps).to(self._dtype)

    def _vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """Logits in float32: rounded to 16 bit, the best would often tie with others."""
        if self._cuda and self._dtype != torch.float32:
            return torch.mm(x, self._head.t(), out_dtype=torch.float32)
        return F.linear(x.float(), self._head.float())

    def _load(self, w: LayerWeights) -> LayerWeights:
        """The same on the device, matrices and biases in the weights' dtype."""
        return LayerWeights(
            input_norm=self._vector(w.input_norm),
            qkv=self._matrix(w.qkv),
            qkv_bias=None if w.qkv_bias is None else self._matrix(w.qkv_bias),
            q_norm=None if w.q_norm is None else self._vector(w.q_norm),
            k_norm=None if w.k_norm is None else self._vector(w.k_norm),
            out=self._matrix(w.out),
            out_bias=None if w.out_bias is None else self._matrix(w.out_bias),
            post_norm=self._vector(w.post_norm),
            gate_up=self._matrix(w.gate_up),
            down=self._matrix(w.down),
        )

    def _matrix(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype).to(self._device)

    def _vector(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._device)
