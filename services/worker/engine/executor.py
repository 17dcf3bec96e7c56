"""The engine as the worker sees it: `TorchExecutor` computes one step after the other.

On a CPU a step is computed when it is begun. A device is handed one, and its result waited for later.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.collective.port import LOOPBACK, Collective
from services.worker.engine.accounting import Account, Found, Rank, account_for
from services.worker.engine.batch import (
    RaggedBatch,
    build_batch,
    check_step,
    prompt_spans,
)
from services.worker.engine.choose import Scope, choose
from services.worker.engine.crossing import group_facts
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.cuda.draw import OnTheWay
from services.worker.engine.decoder import Timed
from services.worker.engine.device import Device
from services.worker.engine.grouped import choose_in_group
from services.worker.engine.kvcache import KvCache, plan_kv
from services.worker.engine.kvmemory import kv_memory_of
from services.worker.engine.native.decoder import NativeDecoder
from services.worker.engine.sampler import SampleRow, sample, top_logprobs
from services.worker.engine.sharded_sampling import ShardedSampler
from services.worker.engine.tuning import Tuning
from services.worker.engine.weights import ModelFolder
from services.worker.memory.block_size import choose_for
from services.worker.memory.served import Load
from services.worker.parallel.split import plan_shards
from services.worker.step import (
    I32,
    NOT_FINITE,
    Computed,
    ExecutorInfo,
    Pending,
    PromptLogprobs,
    SlotArrays,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from services.worker.tier.port import KvMemory
from shared.wire import Sampling


@dataclass(frozen=True)
class EngineOptions:
    """How a model is computed on this rank."""

    dtype: str = "float16"
    """A weight format of `formats.py`, or on CUDA devices bfloat16."""
    kv_dtype: str = "float32"
    kv_bytes: int = 512 << 20
    block_tokens: int = 16
    """0: as many as cost least (`services.worker.memory.block_size`)."""
    max_len: int | None = None
    """Tokens a sequence may have; None: what the model was trained for."""
    threads: int | None = None
    """None: as many as measure best."""
    device: str = "cpu"
    kernels: str = "auto"
    """`native`: compiled kernels or no start; `torch`: none; `auto`: whichever is faster."""
    cores: tuple[int, ...] = ()
    """Cores nobody else computes on, so that threads may be pinned to them; empty: unknown."""
    deterministic: bool = False
    """A sequence's logits keep their bits whatever else is in a step and however the sequence is cut."""
    most_tokens: int = 2048
    """Of a step: room for so many is made."""
    slots: int = 64
    """Sequences that may run at once."""
    runtime_bytes: int | None = None
    """What the process takes before it has a model (`runtime_memory.py`); None: keep no account of memory."""
    staging_bytes: int = 0
    """What others of this process take for KV on its way to other memory."""
    measure_s: float = 2.0
    """Time the start may spend on measuring what is fastest; 0: it takes what is most likely."""


class TorchExecutor:
    """`services.worker.step.OverlappingExecutor` on torch. Construction loads the model, measures its speed.

    In a group, every rank has one, and all compute the same steps at once: `info` is the same on all, and so
    is what steps draw. Raises `UnsupportedModel`, `BadWeights` or ValueError when the model or the options
    cannot be served, and `GroupLost`.
    """

    def __init__(
        self,
        model_dir: Path,
        options: EngineOptions = EngineOptions(),
        collective: Collective = LOOPBACK,
    ) -> None:
        folder = ModelFolder(model_dir, options.max_len)
        self.config = config = folder.config
        self.split = split = plan_shards(config, collective.size)
        shard = split.shards[collective.rank]
        device = Device(options.device, options.dtype)
        blocks = choose_for(config, split, options.kv_dtype, options.block_tokens)
        held = sum(each.kv_heads.size for each in split.shards)
        plan = plan_kv(config, options.kv_dtype, options.kv_bytes, blocks.chosen.block_tokens, held)
        own = replace(config, kv_heads=shard.kv_heads.size)
        found = Found.now(device.torch)
        self._kv = KvCache(own, plan, options.kv_dtype, device.torch)
        found = found.having_kv(device.torch)
        self._collective = collective
        self._batch_s = self._forward_s = self._sample_s = 0.0
        fingerprint = folder.fingerprint(options.dtype, options.kv_dtype)
        scope = Scope(
            options.kernels, options.threads, options.deterministic, options.cores, options.measure_s
        )
        if collective.size == 1:
            made = choose(folder, device, self._kv, scope, fingerprint)
        else:
            fingerprint += f"-tp{collective.size}"  # a rank's KV is only its own heads'
            made = choose_in_group(folder, device, self._kv, scope, collective)
        self._decoder = made.decoder
        self._tuning: Tuning | None = None
        if collective.size > 1 and isinstance(made.decoder, NativeDecoder):
            facts = group_facts(collective, made.candidate.pinned, options.cores)
            self._tuning = Tuning(collective, made.decoder, self._kv, config, options.most_tokens, facts)
        self._sampler: ShardedSampler | None = None
        if collective.size > 1:
            place = shard.vocab.start, shard.vocab.size, config.vocab_size, shard.rank, shard.size
            kernels = made.decoder.kernels if isinstance(made.decoder, NativeDecoder) else None
            self._sampler = ShardedSampler(*place, collective.gather, kernels)
        folder.close()
        self._account: Account | None = None
        if options.runtime_bytes is not None:
            load = Load(
                options.dtype,
                options.kv_dtype,
                plan.blocks,
                plan.block_tokens,
                made.candidate.kernels,
                options.most_tokens,
                options.slots,
                made.candidate.threads,
                options.runtime_bytes,
                options.staging_bytes,
            )
            speed = made.speed.prefill_tok_s
            rank = Rank(made.decoder, self._kv, config, shard, load, self._draw, speed)
            self._account = account_for(rank, found)
        detail = {
            "model": config.family,
            "dtype": options.dtype,
            "kv_dtype": options.kv_dtype,
            "device": options.device,
            "deterministic": "yes" if options.deterministic else "no",
            "block_bytes": str(plan.block_bytes),
            "blocks": blocks.describe(),
        } | made.detail()
        if collective.size > 1:
            detail |= {"tp": str(collective.size), "split": split.describe()}
        self._info = ExecutorInfo(
            fingerprint=fingerprint,
            block_tokens=plan.block_tokens,
            blocks_total=plan.blocks,
            max_len=config.max_len,
            vocab_size=config.vocab_size,
            prefill_tok_s=made.speed.prefill_tok_s,
            decode_step_s=made.speed.decode_step_s,
            detail=tuple(sorted(detail.items())),
            overlaps=isinstance(self._decoder, CudaDecoder),
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def kv(self) -> KvCache:
        return self._kv

    @property
    def kv_memory(self) -> KvMemory:
        """`services.worker.tier.port.HasKvMemory`; made at each call."""
        return kv_memory_of(self._kv)

    def spent(self) -> dict[str, float]:
        """Seconds of all steps so far by kind of work, in the order of a step."""
        inside = self._decoder.spent() if isinstance(self._decoder, Timed) else {"forward": self._forward_s}
        return {"batch building": self._batch_s, **inside, "sampling": self._sample_s}

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        """Compute one step. Rows whose logits are not finite get token -2; the others are not affected.

        Raises ValueError on a step that names slots, positions, blocks or ids which do not exist.
        """
        return self.begin(step, slots).wait()

    @torch.inference_mode()
    def begin(self, step: StepInput, slots: SlotArrays) -> Pending:
        """The part of `run` that does not wait for a device; raises what `run` does."""
        begun = time.perf_counter()
        check_step(step, slots, self._kv.blocks, self.config.max_len)
        for source, target in step.copies:
            self._kv.copy(source, target)
        if not len(step.slots):
            return Computed(StepOutput(np.zeros(0, np.int32)))
        batch = build_batch(step, slots, self._kv.block_tokens)
        if int(batch.block_table.max()) >= self._kv.blocks:
            raise ValueError(f"block {batch.block_table.max()} of {self._kv.blocks}")
        if int(batch.tokens.max()) >= self.config.vocab_size or (
            int(batch.tokens.min()) < 0 and not self._info.overlaps
        ):
            raise ValueError(f"ids from {batch.tokens.min()} to {batch.tokens.max()}: not in the vocabulary")
        built = time.perf_counter()
        logits = self._decoder.forward(batch)
        pending: Pending | None = None
        if isinstance(self._decoder, CudaDecoder):
            tokens = self._decoder.begin_draw(logits, step, slots)
            drawn = tokens is not None
            pending = _OnDevice(self, step, slots, batch, tokens or self._decoder.bring(logits), drawn)
        self._batch_s += built - begun
        self._forward_s += time.perf_counter() - built
        if self._tuning is not None:
            self._tuning.observe(batch.size)
        return pending or Computed(self._sampled(logits, batch, step, slots))

    @torch.inference_mode()
    def finish(self, pending: "_OnDevice") -> StepOutput:
        """The rest of a step that a device was given."""
        begun = time.perf_counter()
        value = pending.value.wait()
        self._forward_s += time.perf_counter() - begun
        step, batch = pending.step, pending.batch
        if not pending.drawn:
            return self._sampled(value, batch, step, pending.slots)
        output = StepOutput(np.full(len(step.slots), -1, np.int32))
        self._take(output, batch, np.flatnonzero(step.samples), value.numpy().astype(np.int32))
        return output

    def memory(self) -> dict[str, Any]:
        """`services.worker.step.AccountedExecutor`"""
        return {} if self._account is None else self._account.as_dict()

    @property
    def account(self) -> Account | None:
        """What this rank takes; None where it was not asked for."""
        return self._account

    # `services.worker.step.GroupedExecutor`

    def news(self) -> dict[str, Any] | None:
        return None if self._tuning is None else self._tuning.news()

    def tune(self, state: dict[str, Any]) -> None:
        if self._tuning is not None:
            self._tuning.tune(state)

    def measure(self, name: str) -> dict[str, Any]:
        """`crossovers`: time the algorithms of sums again. Raises ValueError for another name."""
        if self._tuning is None or name != "crossovers":
            raise ValueError(f"there is no measurement {name!r} here")
        return self._tuning.measure_anew()

    def report(self) -> dict[str, Any]:
        return {} if self._tuning is None else self._tuning.report()

    @property
    def tuning(self) -> Tuning | None:
        """How the group communicates; None of a rank alone, and of ranks that compute with torch."""
        return self._tuning

    def close(self) -> None:
        """Release the memory of weights and KV; the executor cannot be used afterwards."""
        self.__dict__.pop("_decoder", None)
        self.__dict__.pop("_kv", None)

    def _sampled(
        self, logits: torch.Tensor, batch: RaggedBatch, step: StepInput, slots: SlotArrays
    ) -> StepOutput:
        """What the host makes of the logits [len(batch.logit_tokens), vocab] of a step."""
        begun = time.perf_counter()
        output = StepOutput(np.full(len(step.slots), -1, np.int32))
        if self._sampler is None:
            output.prompt_logprobs = _prompt_logprobs(logits, batch, step, slots)
        else:
            output.prompt_logprobs = self._sampler.prompt_logprobs(logits, batch, step, slots)
        sampled = np.flatnonzero(step.samples)
        if len(sampled):
            last = np.searchsorted(batch.logit_tokens, batch.row_start[1:][sampled] - 1)
            chosen = logits if len(last) == len(logits) else logits[torch.from_numpy(last)]
            tokens, logprobs = self._draw(chosen, _sample_rows(slots, step.slots[sampled]))
            output.logprobs = {int(sampled[i]): found for i, found in logprobs.items()}
            self._take(output, batch, sampled, tokens)
        self._sample_s += time.perf_counter() - begun
        return output

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> tuple[I32, dict[int, TokenLogprobs]]:
        if self._sampler is None:
            return sample(logits, rows, self._decoder.scan, self._decoder.draw_rows)
        return self._sampler.sample(logits, rows)

    def _take(self, output: StepOutput, batch: RaggedBatch, sampled: NDArray[np.intp], tokens: I32) -> None:
        output.tokens[sampled] = tokens
        for row in sampled[tokens == NOT_FINITE]:
            # Their blocks go to other sequences, which mask what they have not written but still multiply it.
            blocks = batch.block_table[row]
            for block in blocks[blocks >= 0]:
                self._kv.data[int(block)].nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _OnDevice:
    """`Pending` step of a device: its tokens on their way if they were `drawn` there, else its logits."""

    executor: TorchExecutor
    step: StepInput
    slots: SlotArrays
    batch: RaggedBatch
    value: OnTheWay
    drawn: bool

    @property
    def feeds(self) -> bool:
        return self.drawn or not self.step.samples.any()

    def ready(self) -> bool:
        return self.value.ready()

    def wait(self) -> StepOutput:
        return self.executor.finish(self)


def _sample_rows(slots: SlotArrays, which: I32) -> list[SampleRow]:
    numbers = (which, slots.choice[which], slots.known[which], slots.prompt_len[which])
    return [
        SampleRow(_sampling(slots, slot), choice, slots.tokens[slot, :known], prompt_len)
        for slot, choice, known, prompt_len in zip(*(each.tolist() for each in numbers))
    ]


def _sampling(slots: SlotArrays, slot: int) -> Sampling:
    sampling = slots.sampling[slot]
    if sampling is None:
        raise ValueError(f"slot {slot} is free but samples")
    return sampling


def _prompt_logprobs(
    logits: torch.Tensor, batch: RaggedBatch, step: StepInput, slots: SlotArrays
) -> dict[int, PromptLogprobs]:
    found: dict[int, PromptLogprobs] = {}
    for span in prompt_spans(batch, step, slots):
        count = span.stop - span.first
        raw = torch.log_softmax(logits[span.at : span.at + count], dim=-1)
        rows = top_logprobs(raw, slots.tokens[span.slot, span.first : span.stop], [span.count] * count)
        found[span.row] = PromptLogprobs(span.first, [chosen for chosen, _ in rows], [top for _, top in rows])
    return found
