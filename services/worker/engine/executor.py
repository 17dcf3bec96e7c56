"""The engine as the worker sees it: `TorchExecutor` computes one step after the other."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.batch import RaggedBatch, build_batch, prompt_logprob_span
from services.worker.engine.decoder import Decoder, Timed, TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.kvcache import KvCache, plan_kv
from services.worker.engine.native.build import KernelsUnavailable
from services.worker.engine.native.decoder import Kernels, NativeDecoder, why_not
from services.worker.engine.sampler import NOT_FINITE, SampleRow, sample, top_logprobs
from services.worker.engine.weights import ModelFolder
from services.worker.step import (
    ExecutorInfo,
    PromptLogprobs,
    SlotArrays,
    StepInput,
    StepOutput,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How a model is computed on this rank."""

    dtype: str = "float16"
    """float32, or float16: weights at 16 bit with float32 arithmetic."""
    kv_dtype: str = "float32"
    kv_bytes: int = 512 << 20
    block_tokens: int = 16
    max_len: int | None = None
    """Tokens a sequence may have; None: what the model was trained for."""
    threads: int | None = None
    device: str = "cpu"
    kernels: str = "auto"
    """`native`: compiled kernels or no start; `torch`: none; `auto`: fall back to torch, and say so."""
    measure_s: float = 1.5
    """Time the start may spend on measuring its speed."""


class TorchExecutor:
    """`services.worker.step.Executor` on torch. Construction loads the model and measures its speed.

    Raises `UnsupportedModel`, `BadWeights` or ValueError when the model or the options cannot be served.
    """

    def __init__(self, model_dir: Path, options: EngineOptions = EngineOptions()) -> None:
        threads = options.threads or torch.get_num_threads()
        folder = ModelFolder(model_dir, options.max_len)
        config = folder.config
        device = Device(options.device, options.dtype)
        plan = plan_kv(config, options.kv_dtype, options.kv_bytes, options.block_tokens)
        self._kv = KvCache(config, plan, options.kv_dtype, device.torch)
        self.config = config
        self._batch_s = self._forward_s = self._sample_s = 0.0
        self._decoder, reason = choose_decoder(folder, device, self._kv, options.kernels, threads)
        # With native kernels torch only helps with sampling: a second pool of threads would be in their way.
        torch.set_num_threads(threads if isinstance(self._decoder, TorchDecoder) else 1)
        fingerprint = folder.fingerprint(options.dtype, options.kv_dtype)
        folder.close()
        prefill, decode = measure_speed(self._decoder, self._kv, config.max_len, options.measure_s)
        detail = {
            "model": config.family,
            "dtype": options.dtype,
            "kv_dtype": options.kv_dtype,
            "device": options.device,
            "threads": str(threads),
            "block_bytes": str(plan.block_bytes),
        } | self._decoder.detail()
        if reason:
            detail["kernels_reason"] = reason
        self._info = ExecutorInfo(
            fingerprint=fingerprint,
            block_tokens=plan.block_tokens,
            blocks_total=plan.blocks,
            max_len=config.max_len,
            vocab_size=config.vocab_size,
            prefill_tok_s=prefill,
            decode_step_s=decode,
            detail=tuple(sorted(detail.items())),
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def kv(self) -> KvCache:
        return self._kv

    def spent(self) -> dict[str, float]:
        """Seconds of all steps so far by kind of work, in the order of a step."""
        inside = self._decoder.spent() if isinstance(self._decoder, Timed) else {"forward": self._forward_s}
        return {"batch building": self._batch_s, **inside, "sampling": self._sample_s}

    @torch.inference_mode()
    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        """Compute one step. Rows whose logits are not finite get token -2; the others are not affected.

        Raises ValueError on a step that names blocks or positions which do not exist.
        """
        for source, target in step.copies:
            self._kv.copy(source, target)
        output = StepOutput(tokens=np.full(len(step.slots), -1, np.int32))
        if not len(step.slots):
            return output
        begun = time.perf_counter()
        batch = build_batch(step, slots, self._kv.block_tokens)
        if int(batch.block_table.max()) >= self._kv.blocks:
            raise ValueError(f"block {batch.block_table.max()} of {self._kv.blocks}")
        built = time.perf_counter()
        logits = self._decoder.forward(batch).cpu()
        computed = time.perf_counter()
        output.prompt_logprobs = _prompt_logprobs(logits, batch, step, slots)
        self._sample(logits, batch, step, slots, output)
        self._batch_s += built - begun
        self._forward_s += computed - built
        self._sample_s += time.perf_counter() - computed
        return output

    def close(self) -> None:
        """Release the memory of weights and KV; the executor cannot be used afterwards."""
        self.__dict__.pop("_decoder", None)
        self.__dict__.pop("_kv", None)

    def _sample(
        self, logits: torch.Tensor, batch: RaggedBatch, step: StepInput, slots: SlotArrays, output: StepOutput
    ) -> None:
        sampled = np.flatnonzero(step.samples)
        if not len(sampled):
            return
        last = np.searchsorted(batch.logit_tokens, batch.row_start[1:][sampled] - 1)
        chosen = logits if len(last) == len(logits) else logits[torch.from_numpy(last)]
        rows = [_sample_row(slots, int(slot)) for slot in step.slots[sampled]]
        tokens, logprobs = sample(chosen, rows, self._decoder.scan)
        output.tokens[sampled] = tokens
        output.logprobs = {int(sampled[i]): found for i, found in logprobs.items()}
        for row in sampled[tokens == NOT_FINITE]:
            # Their blocks go to other sequences, which mask what they have not written but still multiply it.
            blocks = batch.block_table[row]
            for block in blocks[blocks >= 0]:
                self._kv.data[int(block)].nan_to_num_(0.0, 0.0, 0.0)


def choose_decoder(
    folder: ModelFolder, device: Device, kv: KvCache, kernels: str, threads: int
) -> tuple[Decoder, str | None]:
    """The fastest decoder for this model here, and why it is not the native one (None if it is).

    Raises `KernelsUnavailable` if `kernels` insists on native ones that cannot be had.
    """
    if kernels not in ("auto", "native", "torch"):
        raise ValueError(f"--kernels {kernels}: choose auto, native or torch")
    if kernels == "torch" or (device.torch.type != "cpu" and kernels == "auto"):
        return TorchDecoder(folder, device, kv), f"{kernels} on {device.torch.type}"
    try:
        if reason := why_not(folder.config, kv):
            raise KernelsUnavailable(reason)
        half = device.weight_dtype == "float16"
        return NativeDecoder(Kernels(threads), folder, half, kv), None
    except KernelsUnavailable as error:
        if kernels == "native":
            raise
        log.warning("native kernels are not used, torch is slower: %s", error)
        return TorchDecoder(folder, device, kv), str(error)


def _sample_row(slots: SlotArrays, slot: int) -> SampleRow:
    sampling = slots.sampling[slot]
    if sampling is None:
        raise ValueError(f"slot {slot} is free but samples")
    return SampleRow(
        sampling=sampling,
        choice=int(slots.choice[slot]),
        history=slots.tokens[slot, : int(slots.known[slot])],
        prompt_len=int(slots.prompt_len[slot]),
    )


def _prompt_logprobs(
    logits: torch.Tensor, batch: RaggedBatch, step: StepInput, slots: SlotArrays
) -> dict[int, PromptLogprobs]:
    found: dict[int, PromptLogprobs] = {}
    for row in range(batch.rows):
        first, stop = prompt_logprob_span(step, slots, row)
        if stop <= first:
            continue
        slot = int(step.slots[row])
        sampling = slots.sampling[slot]
        assert sampling is not None
        assert sampling.prompt_logprobs is not None
        at = int(np.searchsorted(batch.logit_tokens, batch.row_start[row]))
        raw = torch.log_softmax(logits[at : at + stop - first], dim=-1)
        rows = top_logprobs(raw, slots.tokens[slot, first:stop], [sampling.prompt_logprobs] * (stop - first))
        found[row] = PromptLogprobs(first, [chosen for chosen, _ in rows], [top for _, top in rows])
    return found


def measure_speed(decoder: Decoder, kv: KvCache, max_len: int, budget_s: float) -> tuple[float, float]:
    """(prefill tokens/s, seconds of a decode step of one row), each the best of what `budget_s` allows.

    Writes into block 0 onwards: run it before any sequence exists.
    """
    chunk = max(1, min(128, max_len, kv.blocks * kv.block_tokens))
    deadline = time.perf_counter() + budget_s
    prefill = _best_time(decoder, _probe(kv, 0, chunk), deadline - budget_s / 2)
    decode = _best_time(decoder, _probe(kv, chunk - 1, 1), deadline)
    return chunk / prefill, decode


def _best_time(decoder: Decoder, batch: RaggedBatch, deadline: float) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(8):
            begun = time.perf_counter()
            decoder.forward(batch)
            best = min(best, time.perf_counter() - begun)
            if time.perf_counter() > deadline:
                break
    return best


def _probe(kv: KvCache, start: int, count: int) -> RaggedBatch:
    positions = np.arange(start, start + count, dtype=np.int32)
    return RaggedBatch(
        tokens=np.zeros(count, np.int32),
        positions=positions,
        row_start=np.array([0, count], np.int32),
        kv_len=np.array([start + count], np.int32),
        block_table=np.arange(-(-(start + count) // kv.block_tokens), dtype=np.int32)[None],
        write_block=positions // kv.block_tokens,
        write_offset=positions % kv.block_tokens,
        logit_tokens=np.array([count - 1], np.int32),
    )
