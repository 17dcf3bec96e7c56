"""Drawing tokens where the logits are, for rows whose sampling needs no history and no filter.

The rules are those of `services.worker.engine.sampler`; whatever is not plain is drawn there, on the host.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.collective.tensors import Reducer
from services.worker.engine.sampler import COLDEST, HOTTEST
from services.worker.engine.uniform import uniforms
from services.worker.step import I32, NOT_FINITE, SlotArrays, StepInput
from shared.wire import Sampling


@dataclass(frozen=True)
class PlainDraw:
    """The rows of a step that sample, in order."""

    slots: I32
    temperature: NDArray[np.float32]
    """0: the most likely token."""
    uniform: NDArray[np.float64]


class PlainDraws:
    """Tells per step whether all of it can be drawn on the device; remembers what it found per slot."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, np.int64)

    def of(self, step: StepInput, slots: SlotArrays) -> PlainDraw | None:
        """What to draw, or None if some row needs the host or none samples."""
        rows = step.slots
        if len(self._seen) != len(slots.version):
            size = len(slots.version)
            self._seen, self._plain = np.full(size, -1, np.int64), np.zeros(size, np.bool_)
            self._temperature, self._seed = np.zeros(size, np.float32), np.zeros(size, np.uint64)
        for slot in rows[self._seen[rows] != slots.version[rows]].tolist():
            self._look(slot, slots)
        sampled = rows[step.samples]
        if not len(sampled) or not self._plain[rows].all():
            return None
        # Known or on their way: all ids of a row that samples are computed by this step.
        index = (step.starts + step.counts)[step.samples] - slots.prompt_len[sampled]
        choices = slots.choice[sampled].astype(np.uint64)
        drawn = uniforms(self._seed[sampled], choices, index.astype(np.uint64))
        return PlainDraw(sampled, self._temperature[sampled], drawn)

    def _look(self, slot: int, slots: SlotArrays) -> None:
        sampling = slots.sampling[slot]
        if sampling is None:
            raise ValueError(f"slot {slot} is free but computes")
        self._seen[slot] = slots.version[slot]
        self._plain[slot] = is_plain(sampling)
        # Bounded as the sampler does it.
        warm = sampling.temperature >= COLDEST
        self._temperature[slot] = min(sampling.temperature, HOTTEST) if warm else 0.0
        self._seed[slot] = sampling.seed & (2**64 - 1)


def is_plain(s: Sampling) -> bool:
    """Whether the token follows from the logits, the temperature and one uniform."""
    unfiltered = s.top_k <= 0 and s.top_p >= 1.0 and s.min_p <= 0.0
    return (
        (unfiltered or s.temperature < COLDEST)
        and s.logprobs is None
        and s.prompt_logprobs is None
        and not s.logit_bias
        and not (s.min_tokens and s.stop_token_ids)
        and s.repetition_penalty == 1.0
        and not s.presence_penalty
        and not s.frequency_penalty
    )


def draw_plain(logits: torch.Tensor, plan: PlainDraw) -> torch.Tensor:
    """Token of each row of `logits` [rows, vocab] (float32), int64 on their device; nobody waits.

    `NOT_FINITE` where a row holds NaN or infinity.
    """
    low, high = logits.aminmax(dim=-1)
    tokens = logits.argmax(dim=-1)
    if plan.temperature.any():
        # Rows that take the most likely token go through as well, at temperature 1.
        numbers = np.stack([plan.temperature, plan.uniform])
        temperature, uniform = upload(torch.from_numpy(numbers), logits.device)
        warm = torch.where(temperature > 0, temperature, 1.0).float()
        below = (logits - high[:, None]) / warm[:, None]
        ends = below.exp().double().cumsum(dim=-1)
        total = ends[:, -1:]
        place = torch.searchsorted(ends, uniform[:, None] * total, right=True)
        # A product that rounds up to the total would point behind the last that has any weight.
        last = torch.searchsorted(ends, total.contiguous())
        drawn = torch.minimum(place, last)[:, 0]
        tokens = torch.where(temperature > 0, drawn, tokens)
    return torch.where(low.isfinite() & high.isfinite(), tokens, NOT_FINITE)


def draw_split(logits: torch.Tensor, plan: PlainDraw, first: int, reducer: Reducer) -> torch.Tensor:
    """As `draw_plain` and the same on every rank; `logits` [rows, own] are of vocabulary from `first` on.

    One small sum tells all ranks what each found, and a second what the owner of a row's stretch of mass has
    drawn, if some row is not greedy. Token ids travel as floats: there are fewer than 2²⁴.
    """
    low, high = logits.aminmax(dim=-1)
    best = logits.argmax(dim=-1)
    warm = uniform = mass = ends = None
    if plan.temperature.any():
        numbers = np.stack([plan.temperature, plan.uniform])
        temperature, uniform = upload(torch.from_numpy(numbers), logits.device)
        warm = torch.where(temperature > 0, temperature, 1.0)
        below = (logits - high[:, None]) / warm[:, None].float()
        ends = below.exp().double().cumsum(dim=-1)
        mass = ends[:, -1]
    found = logits.new_zeros(reducer.size, len(logits), 5)
    mine = found[reducer.rank]
    mine[:, 0], mine[:, 1] = high, (best + first).float()
    mine[:, 2] = (low.isfinite() & high.isfinite()).float()
    if mass is not None:
        # A double is two floats.
        mine[:, 3] = mass.float()
        mine[:, 4] = (mass - mass.float().double()).float()
    # Zeros and one number: a sum that gathers, exactly.
    reducer.all_reduce(found)
    highs, finite = found[:, :, 0], (found[:, :, 2] > 0).all(dim=0)
    winner = highs.argmax(dim=0)  # the first, whose ids are the lowest
    tokens = found[:, :, 1].gather(0, winner[None])[0].long()
    if mass is not None and ends is not None and uniform is not None and warm is not None:
        scale = ((highs - highs.amax(dim=0)).double() / warm).exp()
        masses = (found[:, :, 3].double() + found[:, :, 4].double()) * scale
        upto = masses.cumsum(dim=0)
        target = uniform * upto[-1]
        # The first rank that ends behind the target; a product rounded up to the total is the last one's.
        owner = (upto <= target).sum(dim=0)
        last = (upto < upto[-1]).sum(dim=0)
        owner = torch.minimum(owner, last)
        rest = (target - (upto - masses)[reducer.rank]) / scale[reducer.rank]
        place = torch.searchsorted(ends, rest[:, None], right=True)
        place = torch.minimum(place, torch.searchsorted(ends, ends[:, -1:].contiguous()))[:, 0]
        told = torch.where(owner == reducer.rank, (place + first).float(), 0.0)
        tokens = torch.where(temperature > 0, reducer.all_reduce(told).long(), tokens)
    return torch.where(finite, tokens, NOT_FINITE)


class OnTheWay:
    """A tensor that is being copied to the host behind what its device has been given so far.

    Nothing given to the device afterwards delays it: a further step may be, before `wait`. `check` is called
    while it has not arrived, and what it raises ends the wait: who waits for a lost rank waits for ever.
    """

    def __init__(self, value: torch.Tensor, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._arrived: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.clone()
        else:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def ready(self) -> bool:
        """`wait` would return at once."""
        arrived = self._arrived is None or bool(self._arrived.query())
        if not arrived and self._check is not None:
            self._check()
        return arrived

    def wait(self) -> torch.Tensor:
        """The copy, on the CPU."""
        if self._arrived is not None and self._check is None:
            self._arrived.synchronize()
        elif self._arrived is not None and self._check is not None:
            await_checked(self._arrived.query, self._check)
        return self._host


def await_checked(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Until `ready`, looking every 0.1 ms; `check` every millisecond. What either raises ends the wait."""
    for looked in itertools.count():
        if ready():
            return
        if looked % 10 == 9:
            check()
        time.sleep(1e-4)


def upload(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`value`, of the host, on the device; nobody waits."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value
