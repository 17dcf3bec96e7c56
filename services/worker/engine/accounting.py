"""The ledger of a rank at run time: what it was predicted to take, and what the system says it took.

On CPUs that is the accounting of the process, not ours: pages that are resident where weights and KV lie, and
the peak of the process while it computes the widest steps there can be. On CUDA devices it is that of the
allocator. What belongs to no class is the runtime's.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import cuda

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.decoder import Decoder
from services.worker.engine.kvcache import KvCache
from services.worker.engine.native.decoder import NativeDecoder
from services.worker.engine.remembered import Remembered
from services.worker.engine.resident import Peak, give_back, resident
from services.worker.engine.sampler import SampleRow
from services.worker.engine.worst import longest_batch, widest_batch, widest_sampling
from services.worker.memory.ledger import Ledger, differences
from services.worker.memory.served import Load, longest_attention, predict_rank
from services.worker.parallel.split import Shard

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""Where the widest step would take longer, fewer tokens are computed and the rest added in proportion."""

Sample = Callable[[torch.Tensor, list[SampleRow]], object]


@dataclass(frozen=True)
class Account:
    """Predicted and measured, of one rank."""

    predicted: Ledger
    measured: Ledger | None
    """None where the system does not tell."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for messages and people."""
        measured = None if self.measured is None else self.measured.as_dict()
        return {"predicted": self.predicted.as_dict(), "measured": measured, "warnings": self.warnings()}

    def warnings(self) -> list[str]:
        if self.measured is None:
            return []
        return [str(found) for found in differences(self.predicted, self.measured)]


@dataclass(frozen=True)
class Found:
    """What was there before the rank loaded anything: of a CPU private memory, of a device what was allocated
    before its KV and after."""

    before: int
    with_kv: int = 0

    @classmethod
    def now(cls, device: torch.device) -> "Found":
        try:
            return cls(cuda.memory_allocated(device) if device.type == "cuda" else resident().private)
        except OSError:
            return cls(0)

    def having_kv(self, device: torch.device) -> "Found":
        return replace(self, with_kv=cuda.memory_allocated(device)) if device.type == "cuda" else self


@dataclass(frozen=True)
class Rank:
    """A rank that has loaded its part of `config`, the whole model's."""

    decoder: Decoder
    kv: KvCache
    config: ModelConfig
    shard: Shard
    load: Load
    sample: Sample
    """Draws from the logits of a step."""
    prefill_tok_s: float

    def widest(self, tokens: int) -> RaggedBatch:
        return widest_batch(tokens, self.load.slots, self.config.max_len, self.kv.block_tokens)

    def draw(self, logits: torch.Tensor) -> None:
        self.sample(logits, widest_sampling(len(logits)))


def weigh(rank: Rank, found: Found) -> Ledger | None:
    """What the rank takes, by computing the widest steps; all ranks of a group do so at once.

    Writes into block 0. None where the system does not tell. Raises `GroupLost`, and ValueError where KV
    memory cannot be had.
    """
    rank.kv.populate()
    give_back()
    try:
        with torch.inference_mode():
            if isinstance(rank.decoder, NativeDecoder):
                return _weigh_native(rank, rank.decoder)
            return _weigh_device(rank, found) if rank.kv.data.is_cuda else _weigh_torch(rank, found)
    except OSError as error:
        log.warning("memory is not measured: %s", error)
        return None


def _weigh_native(rank: Rank, decoder: NativeDecoder) -> Ledger:
    """Every layer takes the memory of the one before: the first and the last tell what all do."""
    layers, load, max_len = decoder.config.layers, rank.load, decoder.config.max_len
    widest = rank.widest(load.step_tokens)
    tokens = longest_attention(decoder.config, rank.shard, load)
    longest = longest_batch(tokens, max_len, rank.kv.block_tokens)
    decoder.reserve(load.step_tokens, len(widest.logit_tokens))
    step = Peak()
    chunks = decoder.plan(widest.size)
    logits = decoder.forward_layers(widest, 0, 1, chunks, embed=True)
    if layers > 1:
        logits = decoder.forward_layers(widest, layers - 1, layers, chunks)
    rank.draw(logits)
    activations = step.grown()
    del logits
    give_back()  # or what sampling let go would hide what attention takes
    cut = Peak()
    decoder.forward_layers(longest, 0, 1, decoder.plan(longest.size), embed=True)
    return _of_process(step, decoder.weights.resident_bytes, rank.kv, activations, cut.grown())


def _weigh_torch(rank: Rank, found: Found) -> Ledger:
    """Of two widths if the widest would take too long: what tokens add to the memory is a line."""
    whole = rank.load.step_tokens
    most = min(whole, max(2 * rank.load.slots, int(PROBE_S * rank.prefill_tok_s)))
    begun = Peak()
    grown = {}
    for tokens in (most,) if most == whole else (most // 2, most):
        step = Peak()
        rank.draw(rank.decoder.forward(rank.widest(tokens)))
        grown[tokens] = step.grown()
        give_back()
    slope = 0.0
    if most < whole:
        slope = max(0.0, (grown[most] - grown[most // 2]) / (most - most // 2))
    weights = begun.before.private - rank.kv.resident_bytes - found.before
    return _of_process(begun, weights, rank.kv, int(grown[most] + slope * (whole - most)), 0)


def _of_process(begun: Peak, weights: int, kv: KvCache, activations: int, states: int) -> Ledger:
    now, blocks = resident(), kv.resident_bytes
    return Ledger(
        runtime_bytes=begun.before.private - weights - blocks + now.files,
        weights_bytes=weights,
        kv_bytes=blocks,
        activation_bytes=activations,
        workspace_bytes=states + now.shared,
    )


def _weigh_device(rank: Rank, found: Found) -> Ledger:
    """By torch's allocator. What else is taken of the device counts as its context: libraries, and whatever
    other processes have there."""
    device = rank.kv.data.device
    cuda.synchronize(device)
    loaded = cuda.memory_allocated(device)
    cuda.reset_peak_memory_stats(device)
    rank.draw(rank.decoder.forward(rank.widest(rank.load.step_tokens)).cpu())
    cuda.synchronize(device)
    weights = loaded - found.with_kv
    if isinstance(rank.decoder, CudaDecoder):
        weights = rank.decoder.weights_allocated
    free, whole = cuda.mem_get_info(device)
    return Ledger(
        runtime_bytes=whole - free - cuda.memory_reserved(device),
        weights_bytes=weights,
        kv_bytes=found.with_kv - found.before,
        activation_bytes=cuda.max_memory_allocated(device) - loaded,
        workspace_bytes=loaded - found.with_kv - weights,
    )


def account_for(rank: Rank, found: Found) -> Account:
    """`weigh`, beside what was predicted.

    What a pass of torch or of a device takes follows from no formula of ours: the first start with a model
    measures it, and later ones predict what was measured then.
    """
    load = rank.load
    predicted = predict_rank(rank.config, rank.shard, load)
    measured = weigh(rank, found)
    if measured is not None:
        measured = replace(measured, staging_bytes=load.staging_bytes)
    if load.kernels == "native" or measured is None:
        return Account(predicted, measured)
    circumstances = {"what": "pass", "config": rank.config, "shard": rank.shard, "load": load}
    memory = Remembered(Ledger, "memory", circumstances | {"torch": torch.__version__})
    known = memory.recall()
    if known is None:
        known = measured
        memory.keep(measured)
    return Account(replace(known, kv_bytes=predicted.kv_bytes), measured)
