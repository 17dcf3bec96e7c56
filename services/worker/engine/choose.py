"""Which decoder computes a model on this CPU, with how many threads: measured at load, and remembered.

What counts is the time of one request of `_PROMPT` and `_OUTPUT` tokens alone on the instance: prompts are
bound by arithmetic, single tokens by memory, and a choice that suits one may not suit the other.
"""

import copy
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.worker.engine import cores
from services.worker.engine.batch import RaggedBatch, one_sequence
from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.decoder import Decoder, Timed, TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.kvcache import KvCache, KvPlan
from services.worker.engine.native import build
from services.worker.engine.native.decoder import Kernels, NativeDecoder, why_not
from services.worker.engine.remembered import Remembered, cpu_name
from services.worker.engine.shards import shard_of
from services.worker.engine.weights import ModelFolder

log = logging.getLogger(__name__)

_PROMPT, _OUTPUT = 256, 64
_CHUNK = 128
"""Tokens of the prompt that is measured."""
_PROBE_LAYERS = 6
"""Layers a decoder is measured with before it is worth loading whole."""
_MARGIN = 0.97
"""How much of the time of what stands before it a candidate may take at most to be preferred."""
_SHOWN = 8
_REPEATS = 8
_MOST_THREADS = 64
"""What may be asked for on machines with fewer cores, where more than those are of no use anyway."""
_UNDISTURBED = 0.85
"""Share of the time measured that this thread must have had a core, for the result to be remembered."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute."""

    kernels: str
    """`native` or `torch`, or `cuda` on such a device."""
    threads: int
    pinned: bool = False
    """Whether the computing threads stay on the cores given to the instance, the caller on the first."""

    def __str__(self) -> str:
        return f"{self.kernels}, {self.threads} thread{'s' * (self.threads > 1)}{', pinned' * self.pinned}"


@dataclass(frozen=True)
class Speed:
    prefill_tok_s: float
    decode_step_s: float
    """Of one sequence with a short history."""

    @property
    def request_s(self) -> float:
        return _PROMPT / self.prefill_tok_s + _OUTPUT * self.decode_step_s


@dataclass(frozen=True)
class Measured:
    candidate: Candidate
    speed: Speed


@dataclass(frozen=True)
class Scope:
    """What may be chosen from."""

    kernels: str = "auto"
    """`native` or `torch`: nothing else; `auto`: the faster one."""
    threads: int | None = None
    """None: from 1 to the cores there are."""
    deterministic: bool = False
    """A token's bits must not depend on the choice either: native kernels if they can be had, which give the
    same with any number of threads, else torch with a number that is not measured."""
    cores: tuple[int, ...] = ()
    """Cores that nobody else computes on, so that threads may be pinned to them; empty: unknown."""
    measure_s: float = 2.0
    """Time for measuring, about; 0: nothing is measured and the first candidate taken."""

    def asked_threads(self) -> int | None:
        """`threads`. Raises ValueError for a number that is of no use."""
        most = max(_MOST_THREADS, os.cpu_count() or 1)
        if self.threads is not None and not 1 <= self.threads <= most:
            raise ValueError(f"--threads {self.threads}: from 1 to {most}, or 0 for what measures best")
        return self.threads

    def thread_counts(self) -> tuple[int, ...]:
        """Most first: with little time, that is the best guess."""
        if (asked := self.asked_threads()) is not None:
            return (asked,)
        most = len(self.cores or os.sched_getaffinity(0))
        counts = {*range(1, min(most, 8) + 1), *(1 << i for i in range(4, most.bit_length())), most}
        return tuple(sorted(counts, reverse=True))


@dataclass(frozen=True)
class _Fact:
    """What is remembered of a measurement."""

    chosen: Candidate
    table: tuple[Measured, ...]


@dataclass(frozen=True)
class Choice:
    decoder: Decoder
    candidate: Candidate
    speed: Speed
    table: tuple[Measured, ...]
    """What was measured, best first; empty where there was nothing to choose."""
    reason: str | None
    """Why the native kernels were no candidate, if they were none."""
    origin: str
    """How it came about, for people."""

    def detail(self) -> dict[str, str]:
        rows = [
            {
                "kernels": m.candidate.kernels,
                "threads": m.candidate.threads,
                "pinned": m.candidate.pinned,
                "decode_ms": round(m.speed.decode_step_s * 1e3, 2),
                "prefill_tok_s": round(m.speed.prefill_tok_s, 1),
                "chosen": m.candidate == self.candidate,
            }
            for m in self.table[:_SHOWN]
        ]
        found = self.decoder.detail() | {
            "threads": str(self.candidate.threads),
            "pinned": "yes" if self.candidate.pinned else "no",
            "choice": f"{self.candidate}: {self.origin}",
            "candidates": json.dumps(rows, separators=(",", ":")),
        }
        return found | ({"kernels_reason": self.reason} if self.reason else {})


class _Builder:
    """Makes decoders of one model, and native ones change their team instead of loading anew."""

    def __init__(self, folder: ModelFolder, device: Device, kv: KvCache, scope: Scope) -> None:
        self._folder, self._device, self._kv = folder, device, kv
        self._own, self._deterministic = scope.cores, scope.deterministic
        self._allowed = os.sched_getaffinity(0)
        self._native: NativeDecoder | None = None
        self._team: Kernels | None = None
        self._part: tuple[Decoder, KvCache, float] | None = None

    def whole(self, candidate: Candidate) -> Decoder:
        """The decoder, this thread and torch set up for it."""
        if candidate.kernels == "torch":
            self._dismiss()
            self._native = None
            torch.set_num_threads(candidate.threads)
            return TorchDecoder(self._folder, self._device, self._kv, self._deterministic)
        team = self._muster(candidate)
        if self._native is None:
            self._native = NativeDecoder(team, shard_of(self._folder), self._device.form, self._kv)
        self._native.use(team)
        self._dismiss()
        self._team = team
        # torch only helps with sampling: a second pool of threads would be in the team's way.
        torch.set_num_threads(1)
        return self._native

    def part(self) -> tuple[Decoder, KvCache, float]:
        """A torch decoder of the first layers, its KV, and how many times as many layers the model has."""
        if self._part is not None:
            return self._part
        config = self._folder.config
        layers = min(config.layers, _PROBE_LAYERS)
        folder = copy.copy(self._folder)
        folder.config = replace(config, layers=layers)
        size = self._kv.block_tokens
        dtype = str(self._kv.data.dtype).removeprefix("torch.")
        plan = KvPlan(size, 0, -(-min(_CHUNK, config.max_len) // size))
        kv = KvCache(folder.config, plan, dtype, self._device.torch)
        self._part = TorchDecoder(folder, self._device, kv), kv, config.layers / layers
        return self._part

    def _muster(self, candidate: Candidate) -> Kernels:
        """A team; threads inherit the cores of the one that starts them."""
        if not candidate.pinned:
            os.sched_setaffinity(0, self._allowed)
            return Kernels(candidate.threads)
        own = self._own[: candidate.threads]
        os.sched_setaffinity(0, own[1:] or own)
        team = Kernels(candidate.threads)
        os.sched_setaffinity(0, own[:1])
        return team

    def _dismiss(self) -> None:
        if self._team is not None:
            self._team.close()
            self._team = None


def choose(folder: ModelFolder, device: Device, kv: KvCache, scope: Scope, fingerprint: str) -> Choice:
    """The fastest decoder for this model on this CPU. Writes into block 0 onwards: no sequence may exist.

    Raises `KernelsUnavailable` if `scope` insists on native kernels that cannot be had, and ValueError for
    one that cannot be met.
    """
    if device.torch.type != "cpu":
        return _on_device(folder, device, kv, scope)
    kinds, reason = kinds_of_kernels(folder.config, kv, scope.kernels)
    if not set(scope.cores) <= os.sched_getaffinity(0):
        raise ValueError(f"cores {scope.cores}: this process may only use {sorted(os.sched_getaffinity(0))}")
    if scope.deterministic:
        kinds = kinds[:1]
    candidates = [Candidate(kind, count) for kind in kinds for count in scope.thread_counts()]
    if scope.deterministic and kinds == ("torch",):
        del candidates[1:]
    can_pin = bool(scope.cores) and "native" in kinds
    builder = _Builder(folder, device, kv, scope)
    max_len = folder.config.max_len
    memory = Remembered(_Fact, "choices", _circumstances(fingerprint, device, candidates, scope))
    known = memory.recall() if scope.measure_s > 0 else None
    if known is not None and replace(known.chosen, pinned=False) in candidates:
        if known.chosen.pinned and not cores.claim(scope.cores):
            known = replace(known, chosen=replace(known.chosen, pinned=False))
        decoder = builder.whole(known.chosen)
        speed = measure_speed(decoder, kv, max_len, scope.measure_s / 4)
        return Choice(decoder, known.chosen, speed, known.table, reason, "measured at an earlier start")
    decoder = builder.whole(candidates[0])
    if scope.measure_s <= 0 or (len(candidates) == 1 and not can_pin):
        speed = measure_speed(decoder, kv, max_len, scope.measure_s / 2)
        if scope.measure_s <= 0:
            return Choice(decoder, candidates[0], speed, (), reason, "not measured")
        table = [Measured(candidates[0], speed)]
        return Choice(decoder, candidates[0], speed, tuple(table), reason, "the only candidate")
    table, alone = _measure_all(builder, candidates, scope, kv, max_len)
    best = _best(table)
    if not best.candidate.pinned:
        cores.release()
    table.sort(key=lambda m: m.speed.request_s)
    within = "" if table[0] is best else f"within {1 - _MARGIN:.0%} of "
    origin = f"{within}the fastest of {len(table)} measured"
    if alone:
        memory.keep(_Fact(best.candidate, tuple(table)))
    else:
        origin += ", while others wanted the cores: measured anew at the next start"
    return Choice(builder.whole(best.candidate), best.candidate, best.speed, tuple(table), reason, origin)


def _measure_all(
    builder: _Builder, candidates: Sequence[Candidate], scope: Scope, kv: KvCache, max_len: int
) -> tuple[list[Measured], bool]:
    """What was measured in time, and whether this thread had its core meanwhile.

    The first candidate always is; the fastest is tried pinned, if that is known to disturb nobody.
    """
    share = scope.measure_s / (len(candidates) + 1)
    begun, cpu_begun = time.perf_counter(), time.thread_time()

    def alone() -> bool:
        return time.thread_time() - cpu_begun >= _UNDISTURBED * (time.perf_counter() - begun)

    table: list[Measured] = []
    for candidate in candidates:
        if table and time.perf_counter() > begun + scope.measure_s:
            break
        table.append(Measured(candidate, _try(builder, candidate, kv, max_len, share)))
    best = _best(table).candidate
    can_pin = best.kernels == "native" and len(scope.cores) >= best.threads
    if can_pin and alone() and cores.claim(scope.cores):
        pinned = replace(best, pinned=True)
        table.append(Measured(pinned, _try(builder, pinned, kv, max_len, share)))
    return table, alone()


def _on_device(folder: ModelFolder, device: Device, kv: KvCache, scope: Scope) -> Choice:
    """Devices other than CPUs have one decoder, and threads of ours do not matter there."""
    kind = device.torch.type
    if scope.kernels not in ("auto", "torch"):
        raise ValueError(f"--kernels {scope.kernels} on {kind}: choose auto or torch")
    if scope.deterministic:
        raise ValueError(
            f"--deterministic is computed on CPUs only, not on {kind}: leave it out, or --device cpu"
        )
    own = kind == "cuda" and scope.kernels == "auto"
    dtype = getattr(torch, device.weight_dtype)
    decoder: Decoder = CudaDecoder(folder, kv, dtype) if own else TorchDecoder(folder, device, kv)
    speed = measure_speed(decoder, kv, folder.config.max_len, scope.measure_s / 2)
    candidate = Candidate("cuda" if own else "torch", scope.threads or torch.get_num_threads())
    return Choice(decoder, candidate, speed, (), f"{scope.kernels} on {kind}", "the only candidate")


def _circumstances(
    fingerprint: str, device: Device, candidates: list[Candidate], scope: Scope
) -> dict[str, object]:
    native = any(c.kernels == "native" for c in candidates)
    return {
        "model": fingerprint,
        "dtype": device.weight_dtype,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "exclusive cores": len(scope.cores),
        "kernels": build.library_path().name if native else "",
        "torch": torch.__version__,
        "candidates": [str(c) for c in candidates],
    }


def kinds_of_kernels(config: ModelConfig, kv: KvCache, kernels: str) -> tuple[tuple[str, ...], str | None]:
    """Kinds of kernels to choose from, and why the native ones are not among them."""
    if kernels not in ("auto", "native", "torch"):
        raise ValueError(f"--kernels {kernels}: choose auto, native or torch")
    if kernels == "torch":
        return ("torch",), "torch is asked for"
    try:
        if reason := why_not(config, kv):
            raise build.KernelsUnavailable(reason)
        build.load()
    except build.KernelsUnavailable as error:
        if kernels == "native":
            raise
        log.warning("native kernels are not used, torch is slower: %s", error)
        return ("torch",), str(error)
    return (("native",) if kernels == "native" else ("native", "torch")), None


def _best(table: Sequence[Measured]) -> Measured:
    """The first that no later one beats clearly: what stands first is preferred."""
    best = table[0]
    for found in table[1:]:
        if found.speed.request_s < _MARGIN * best.speed.request_s:
            best = found
    return best


def _try(builder: _Builder, candidate: Candidate, kv: KvCache, max_len: int, budget_s: float) -> Speed:
    if candidate.kernels == "native":
        return measure_speed(builder.whole(candidate), kv, max_len, budget_s)
    before = torch.get_num_threads()
    torch.set_num_threads(candidate.threads)
    try:
        decoder, own, times = builder.part()
        return measure_speed(decoder, own, max_len, budget_s, times)
    finally:
        torch.set_num_threads(before)


def measure_speed(
    decoder: Decoder,
    kv: KvCache,
    max_len: int,
    budget_s: float,
    layers_times: float = 1.0,
    repeats: int = _REPEATS,
) -> Speed:
    """The best of `repeats` or of what `budget_s` allows. A decoder of fewer layers than the model is scaled
    up to it.

    Writes into block 0 onwards: run it before any sequence exists.
    """
    chunk = max(1, min(_CHUNK, max_len, kv.blocks * kv.block_tokens))
    deadline = time.perf_counter() + budget_s
    decode = _best_time(
        decoder, one_sequence(chunk - 1, 1, kv.block_tokens), deadline - 0.6 * budget_s, layers_times, repeats
    )
    prefill = _best_time(decoder, one_sequence(0, chunk, kv.block_tokens), deadline, layers_times, repeats)
    return Speed(chunk / prefill, decode)


def _best_time(
    decoder: Decoder, batch: RaggedBatch, deadline: float, layers_times: float, repeats: int
) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(repeats):
            before = _spent(decoder)
            begun = time.perf_counter()
            decoder.forward(batch).cpu()
            took = time.perf_counter() - begun
            once = sum(
                _spent(decoder).get(phase, 0.0) - before.get(phase, 0.0) for phase in ("embed", "head")
            )
            best = min(best, once + (took - once) * layers_times)
            if time.perf_counter() > deadline:
                break
    return best


def _spent(decoder: Decoder) -> dict[str, float]:
    return decoder.spent() if isinstance(decoder, Timed) else {}
