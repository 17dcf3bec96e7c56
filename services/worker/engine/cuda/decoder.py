"""The forward pass on a CUDA device; decode steps are replayed from captured graphs.

Matrices, what they multiply and attention are in the weights' dtype; the residual stream, norms, rotation and
logits in float32.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.cuda.attention import Attend, choose_attention
from services.worker.engine.cuda.draw import OnTheWay, PlainDraw, PlainDraws, draw_plain, upload
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
from services.worker.engine.decoder import rotate
from services.worker.engine.draw import draw_rows
from services.worker.engine.kvcache import KvCache
from services.worker.engine.rope import rope_tables
from services.worker.engine.sampler import scan_rows
from services.worker.engine.weights import LayerWeights, ModelFolder
from services.worker.step import I32, SlotArrays, StepInput

FED_SLOTS = 4096
"""Slots whose last token is kept on the device."""


class CudaDecoder:
    """`services.worker.engine.decoder.Decoder` in float32, float16 or bfloat16.

    The last block of `kv` belongs to no sequence. A token id of -1 - s in a batch stands for the token drawn
    last for slot s by `draw`, which the device takes from its own memory: a step can be handed over before
    the tokens of the one before have reached the host (docs/gpu.md). On a CPU the same code runs, nothing
    captured.
    """

    def __init__(self, folder: ModelFolder, kv: KvCache, dtype: torch.dtype, graphs: bool = True) -> None:
        c = self.config = folder.config
        self._kv, self._dtype = kv, dtype
        self._device = kv.data.device
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            # Captures, and streams not named, are of the thread's current device.
            torch.cuda.set_device(self._device)
        self._scratch = kv.blocks
        if len(kv.data) <= kv.blocks:
            raise ValueError(f"KV of {len(kv.data)} blocks, all of them sequences': one more is needed")
        embed = folder.tensor("model.embed_tokens.weight")
        self._embed = self._matrix(embed)
        self._head = self._embed if c.tied else self._matrix(folder.tensor("lm_head.weight"))
        self._norm = self._vector(folder.tensor("model.norm.weight"))
        self._layers = [self._load(layer) for layer in folder.layers()]
        self._cos, self._sin = map(self._vector, rope_tables(c))
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
        return {"kernels": "cuda", "attention": self._attention.name + why, "graphs": graphs}

    def scan(self, values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        return scan_rows(values)

    def draw_rows(self, values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
        return draw_rows(values, draws)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [len(batch.logit_tokens), vocab], float32 on the device; the next call overwrites them."""
        rows = bucket_of(batch) if self.captures else None
        if rows is None:
            self._attention.plan(batch, fixed=False)
            flat = pack(batch, self._cuda).to(self._device, non_blocking=True)
            return self._pass(unpack(flat, batch))
        logits = self._replay(batch, rows)
        wanted = batch.logit_tokens
        if len(wanted) == batch.rows:
            return logits[: batch.rows]
        return logits[upload(torch.from_numpy(wanted.astype(np.int64)), self._device)]

    def begin_draw(self, logits: torch.Tensor, step: StepInput, slots: SlotArrays) -> OnTheWay | None:
        """Tokens of the step's sampling rows, drawn here; None if some row's sampling needs the host.

        `logits` are those of the step, no more.
        """
        plan = self._plans.of(step, slots)
        return None if plan is None else OnTheWay(self.draw(logits, plan))

    def draw(self, logits: torch.Tensor, plan: PlainDraw) -> torch.Tensor:
        """The tokens of `draw_plain`, on the device; the device remembers them as each slot's last."""
        if plan.slots.max() >= FED_SLOTS:
            raise ValueError(f"slot {plan.slots.max()}: a CUDA device holds {FED_SLOTS}; lower --max-slots")
        tokens = draw_plain(logits, plan)
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
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def _fixed_pass(self, flat: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        return self._logits[: batch.rows].copy_(self._pass(unpack(flat, batch)))

    def _pass(self, inputs: StepInputs) -> torch.Tensor:
        c, write = self.config, (inputs.write_block, inputs.write_offset)
        attend: Attend = self._attention.begin(inputs)
        cos, sin = self._cos[inputs.positions][:, None], self._sin[inputs.positions][:, None]
        fed = self._last[(-1 - inputs.tokens).clamp(min=0)]
        x = self._embed[torch.where(inputs.tokens < 0, fed, inputs.tokens)].float()
        for i, w in enumerate(self._layers):
            qkv = F.linear(self._normed(x, w.input_norm), w.qkv, w.qkv_bias)
            q, k, v = qkv.split((c.q_size, c.kv_size, c.kv_size), dim=-1)
            q = q.view(-1, c.heads, c.head_dim)
            k = k.view(-1, c.kv_heads, c.head_dim)
            v = v.view(k.shape)
            if w.q_norm is not None and w.k_norm is not None:
                q = F.rms_norm(q.float(), (c.head_dim,), w.q_norm, c.norm_eps)
                k = F.rms_norm(k.float(), (c.head_dim,), w.k_norm, c.norm_eps)
            q, k = rotate(q, cos, sin).to(self._dtype), rotate(k, cos, sin)
            self._kv.data[write[0], i, 0, :, write[1]] = k.to(self._kv.data.dtype)
            self._kv.data[write[0], i, 1, :, write[1]] = v.to(self._kv.data.dtype)
            attended = attend(i, q).reshape(-1, c.q_size)
            if i + 1 == c.layers:
                # Of other tokens only keys and values are ever read.
                if not len(inputs.logit_tokens):
                    return self._logits[:0]
                x, attended = x[inputs.logit_tokens], attended[inputs.logit_tokens]
            x = x + F.linear(attended, w.out, w.out_bias)
            gate, up = F.linear(self._normed(x, w.post_norm), w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
        return self._vocabulary(self._normed(x, self._norm))

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
