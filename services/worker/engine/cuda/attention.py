"""Attention over paged KV on a device, as it lies in `KvCache`: by FlashInfer, or gathered for torch's SDPA.

FlashInfer reads blocks in place; gathering copies every row's KV once per layer, so it moves about three
times the bytes. It is what is left where FlashInfer is not installed or does not know the format.
"""

import importlib
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda.inputs import BUCKETS, StepInputs, idle_decode, page_lists
from services.worker.engine.kvcache import KvCache

log = logging.getLogger(__name__)

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, queries [T, heads, head_dim]) → [T, heads, head_dim], once the layer's KV is written."""

_GATHER_BYTES = 256 << 20
"""Most KV that is gathered at once."""
_NARROWEST = 16
"""Table columns of the narrowest captured graph; wider ones double."""
_WORKSPACE = 256 << 20
_HEAD_DIMS = (64, 128, 256)


class PagedAttention(Protocol):
    name: str

    def width(self, blocks: int) -> int:
        """Table columns a captured step has on the device if its longest row holds `blocks`."""
        ...

    def plan(self, batch: RaggedBatch, fixed: bool, place: int = 0) -> None:
        """Get ready for `batch`, outside any graph. `fixed`: it is padded and its graph is replayed. `place`:
        which of several batches of a pass it is, whose attention is all computed afterwards."""
        ...

    def begin(self, inputs: StepInputs) -> Attend:
        """Attention of the batch planned last; may be captured. `inputs` are that batch on the device."""
        ...


class GatheredAttention:
    """`PagedAttention` on any torch device and in any format."""

    name = "sdpa"

    def __init__(self, config: ModelConfig, kv: KvCache) -> None:
        self._config, self._kv = config, kv
        self._most = -(-config.max_len // kv.block_tokens)
        self._runs: list[tuple[int, int, int, int, int]] = []

    def width(self, blocks: int) -> int:
        width = _NARROWEST
        while width < blocks:
            width *= 2
        return min(width, max(self._most, blocks))

    def plan(self, batch: RaggedBatch, fixed: bool, place: int = 0) -> None:
        counts, columns = np.diff(batch.row_start), batch.block_table.shape[1]
        row_bytes = self._kv.rows.shape[1] * self._kv.data.element_size() * self._config.kv_heads * columns
        most = max(1, _GATHER_BYTES // row_bytes)
        # Neighbouring rows of one token are done together, padded to the longest; every other row alone.
        bounds = [0]
        for row in range(1, batch.rows):
            if counts[row] > 1 or counts[row - 1] > 1 or row - bounds[-1] >= most:
                bounds.append(row)
        self._runs = []
        for first, stop in pairwise([*bounds, batch.rows]):
            blocks = columns if fixed else -(-int(batch.kv_len[first:stop].max()) // self._kv.block_tokens)
            self._runs.append((first, stop, int(batch.row_start[first]), int(counts[first]), blocks))

    def begin(self, inputs: StepInputs) -> Attend:
        runs = [_Run(self._config, self._kv, inputs, *run) for run in self._runs]
        return lambda layer, q: torch.cat([run.attend(layer, q) for run in runs])


class _Run:
    """Rows [first, stop), each of `count` tokens from `token` on, over their first `blocks` table columns."""

    def __init__(
        self,
        config: ModelConfig,
        kv: KvCache,
        inputs: StepInputs,
        first: int,
        stop: int,
        token: int,
        count: int,
        blocks: int,
    ) -> None:
        self._config, self._kv, self._count = config, kv, count
        self._tokens = slice(token, token + (stop - first) * count)
        device = kv.data.device
        # Index into kv.rows of (row, head, block) at layer 0, k. Tables are -1 behind a row's end: block 0 is
        # read there and masked.
        table = inputs.block_table[first:stop, :blocks].clamp(min=0)
        heads = torch.arange(config.kv_heads, device=device)
        index = table[:, None, :] * (config.layers * 2 * config.kv_heads) + heads[None, :, None]
        self._index = index.reshape(-1)
        self._shape = (stop - first, config.kv_heads, blocks * kv.block_tokens, config.head_dim)
        last = inputs.positions[self._tokens].view(stop - first, count, 1)
        visible = torch.arange(self._shape[2], device=device) <= last
        # [rows, 1, group × count, length]: query heads of one KV head stand side by side as queries.
        self._mask = visible[:, None].repeat(1, 1, config.group, 1)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        c, n = self._config, self._shape[0]
        q = q[self._tokens].view(n, self._count, c.kv_heads, c.group, c.head_dim).permute(0, 2, 3, 1, 4)
        queries = q.reshape(n, c.kv_heads, c.group * self._count, c.head_dim)
        k, v = self._gather(2 * layer, queries.dtype), self._gather(2 * layer + 1, queries.dtype)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=self._mask)
        out = out.view(n, c.kv_heads, c.group, self._count, c.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n * self._count, c.heads, c.head_dim)

    def _gather(self, plane: int, dtype: torch.dtype) -> torch.Tensor:
        index = self._index + plane * self._config.kv_heads
        return self._kv.rows.index_select(0, index).view(self._shape).to(dtype)


class FlashInferAttention:
    """`PagedAttention` by FlashInfer's batch wrappers (docs.flashinfer.ai: prefill, decode).

    A block's heads lie [head, token, dim], FlashInfer's HND; blocks of one layer are all layers apart, which
    its kernels take as the stride of a page.
    """

    name = "flashinfer"

    def __init__(self, config: ModelConfig, kv: KvCache, dtype: torch.dtype) -> None:
        self._library: Any = importlib.import_module("flashinfer")
        self._config, self._kv, self._dtype = config, kv, dtype
        self._planes = [(kv.data[:, i, 0], kv.data[:, i, 1]) for i in range(config.layers)]
        device = kv.data.device
        # Zeros, as the library asks for: its semaphores live here too.
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        most = BUCKETS[-1] * -(-config.max_len // kv.block_tokens)
        self._pages = torch.zeros(most, dtype=torch.int32, device=device)
        self._mixed: list[Any] = []
        """By place; they are run one after the other, so that one workspace serves all."""
        self._fixed: dict[int, Any] = {}
        self._planned: dict[int, torch.cuda.Event] = {}
        self._now: Any = None

    def width(self, blocks: int) -> int:
        return 0

    def plan(self, batch: RaggedBatch, fixed: bool, place: int = 0) -> None:
        c = self._config
        self._now = self._fixed_rows(batch.rows) if fixed else self._mixed_rows(place)
        # A plan is written to pinned memory of the wrapper, from where the former may still be on its way.
        planned = self._planned.setdefault(id(self._now), torch.cuda.Event())
        planned.synchronize()
        starts, pages, ends = map(torch.from_numpy, page_lists(batch, self._kv.block_tokens))
        # The other two are read on the host. This one would be copied with a wait for the device.
        pages = pages.pin_memory().to(self._kv.data.device, non_blocking=True)
        shape = (c.heads, c.kv_heads, c.head_dim, self._kv.block_tokens)
        formats = {"q_data_type": self._dtype, "kv_data_type": self._kv.data.dtype}
        if fixed:
            self._now.plan(starts, pages, ends, *shape, **formats)
        else:
            row_start = torch.from_numpy(batch.row_start)
            self._now.plan(row_start, starts, pages, ends, *shape, causal=True, **formats)
        planned.record()

    def begin(self, inputs: StepInputs) -> Attend:
        wrapper = self._now
        return lambda layer, q: wrapper.run(q, self._planes[layer])

    def probe(self, scratch: int) -> None:
        """Compute something with each kind of kernel, in block `scratch`. Raises whatever does not work."""
        c, batch = self._config, idle_decode(2, 1, scratch)
        q = torch.zeros(batch.rows, c.heads, c.head_dim, dtype=self._dtype, device=self._kv.data.device)
        for fixed in (False, True):
            self.plan(batch, fixed)
            self._now.run(q, self._planes[0])
        torch.cuda.synchronize()

    def _mixed_rows(self, place: int) -> Any:
        while len(self._mixed) <= place:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._mixed.append(wrapper)
        return self._mixed[place]

    def _fixed_rows(self, rows: int) -> Any:
        """The wrapper of captured steps of `rows` rows; its buffers stay where its graph expects them."""
        if rows not in self._fixed:
            device = self._kv.data.device
            self._fixed[rows] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "HND",
                use_cuda_graph=True,
                # The tensor-core kernel takes any number of query heads per KV head.
                use_tensor_cores=True,
                paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=self._pages,
                paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32, device=device),
                backend="fa2",
            )
        return self._fixed[rows]


def why_not_flashinfer(config: ModelConfig, kv_dtype: torch.dtype, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot be asked for this format, or None."""
    if dtype not in (torch.float16, torch.bfloat16) or kv_dtype != dtype:
        return f"weights {dtype}, KV {kv_dtype}: it needs both float16 or both bfloat16"
    if config.head_dim not in _HEAD_DIMS:
        return f"head size {config.head_dim} is none of {', '.join(map(str, _HEAD_DIMS))}"
    return None


def choose_attention(
    config: ModelConfig, kv: KvCache, dtype: torch.dtype, scratch: int
) -> tuple[PagedAttention, str | None]:
    """FlashInfer if it is installed and works here, else gathering, and then why."""
    if kv.data.device.type != "cuda":
        return GatheredAttention(config, kv), "no CUDA device"
    reason = why_not_flashinfer(config, kv.data.dtype, dtype)
    if reason is None:
        try:
            found = FlashInferAttention(config, kv, dtype)
            # Its kernels are compiled at first use, which takes a compiler: better now than in a step.
            found.probe(scratch)
            return found, None
        except Exception as error:  # a library of many parts, any of which may be missing
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    log.warning("FlashInfer is not used, attention is slower: %s", reason)
    return GatheredAttention(config, kv), reason
