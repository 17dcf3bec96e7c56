"""The seam between the worker's bookkeeping and an executor: one step in, one result out.

`SlotArrays` is the persistent batch: row s belongs to slot s, kept up to date by diffs. An executor reads it
and writes nothing but device memory; the bookkeeping (`services/worker/slots.py`) owns every field.

A step may be begun while the one before is under way (`OverlappingExecutor`). What that one draws is not in
the arrays yet: where a row's last position is `known`, its id is the one that the step before draws.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shared.wire import Sampling

I32 = NDArray[np.int32]

NOT_FINITE = -2
"""Instead of a token, where a row's logits hold NaN or infinity."""


@dataclass
class SlotArrays:
    """Persistent batch of an instance."""

    tokens: I32
    """[max_slots, max_len] ids known so far: prompt, then output."""
    block_table: I32
    """[max_slots, max_blocks] physical block of each logical block; -1 beyond the table."""
    computed: I32
    """[max_slots] tokens whose KV is written (or will be by the steps already begun)."""
    known: I32
    """[max_slots] ids valid in `tokens`; an id on its way is not counted."""
    prompt_len: I32
    """[max_slots] length of the request's original prompt."""
    choice: I32
    sampling: list[Sampling | None]
    """Per slot; None where the slot is free."""
    version: NDArray[np.int64]
    """[max_slots] raised at every admission, so that an executor can cache what it derives per slot."""
    generation: int = 0
    """Raised at every admission into any slot: as long as it stands still, so does every `version`."""


@dataclass
class StepInput:
    """Rows of one step, in slot order. Row r computes ids [starts[r], starts[r] + counts[r]) of its slot."""

    slots: I32
    starts: I32
    counts: I32
    samples: NDArray[np.bool_]
    """Whether the row's last token is the last of its sequence so far, so that the next is drawn."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(src, dst) blocks to copy before anything is computed."""


@dataclass
class TokenLogprobs:
    chosen: float
    top: list[tuple[int, float]]


@dataclass
class PromptLogprobs:
    """Of prompt positions [start, start + len(chosen)): the token at each position given those before."""

    start: int
    chosen: list[float]
    top: list[list[tuple[int, float]]]


@dataclass
class StepOutput:
    """`tokens[r]` is the drawn id of row r, -1 where nothing was drawn, -2 where logits were not finite."""

    tokens: I32
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row index; only rows whose sampling asks for it."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecutorInfo:
    """What the worker announces of its executor."""

    fingerprint: str
    block_tokens: int
    blocks_total: int
    max_len: int
    vocab_size: int
    prefill_tok_s: float
    decode_step_s: float
    detail: tuple[tuple[str, str], ...] = ()
    overlaps: bool = False
    """It is an `OverlappingExecutor`, and gains by it: its device computes by itself."""


class Executor(Protocol):
    """Computes steps, one at a time, in order. Built once per process; may block (it runs in a thread)."""

    @property
    def info(self) -> ExecutorInfo: ...

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput: ...

    def close(self) -> None: ...


class Pending(Protocol):
    """A step that was begun."""

    @property
    def feeds(self) -> bool:
        """The next step may be begun before `wait`: all that this one draws it finds on the device."""
        ...

    def ready(self) -> bool:
        """`wait` would return at once."""
        ...

    def wait(self) -> StepOutput:
        """The result. Called once, in the order of the steps, each when the one before is committed."""
        ...


@dataclass(slots=True)
class Computed:
    """`Pending` whose result is there."""

    output: StepOutput
    feeds: bool = False

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self.output


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """Hands steps over to a device that computes them in order, while the host goes on.

    One step may be begun while another that `feeds` is under way; `run` is `begin` and `wait`.
    """

    def begin(self, step: StepInput, slots: SlotArrays) -> Pending:
        """Take what `slots` says about `step`; for rows drawn on the host, `wait` looks there once more."""
        ...


@runtime_checkable
class GroupedExecutor(Executor, Protocol):
    """One of a group of ranks: what changes how it computes is decided on rank 0 and told to all."""

    def news(self) -> dict[str, Any] | None:
        """Asked on rank 0 before each step: what all ranks are to be told first; None: nothing new."""
        ...

    def tune(self, state: dict[str, Any]) -> None:
        """What rank 0 had to tell, on every rank between the same two steps."""
        ...

    def measure(self, name: str) -> dict[str, Any]:
        """A measurement that all ranks make together; rank 0's result counts. ValueError: unknown name."""
        ...

    def report(self) -> dict[str, Any]:
        """How rank 0 and the others communicate, as plain data: from any thread, at any time."""
        ...


@runtime_checkable
class AccountedExecutor(Protocol):
    """One that knows the memory of its rank."""

    def memory(self) -> dict[str, Any]:
        """`predicted` and `measured` bytes by class, and `warnings`; empty: it is not accounted for."""
        ...
