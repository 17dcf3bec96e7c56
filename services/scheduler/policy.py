"""Which running batch may take newcomers: the one decision in which batching policies differ."""

from typing import Protocol


class BatchPolicy(Protocol):
    """Asked at each step."""

    @property
    def joins_together(self) -> bool:
        """Whether newcomers are admitted also when the step's budget for prompts is used up."""

    def may_join(self, running: int, limit: int) -> int:
        """How many sequences may join a batch of `running`, of which `limit` fit."""


class ContinuousPolicy:
    """Iteration-level batching: anybody may join at any step."""

    joins_together = False

    def may_join(self, running: int, limit: int) -> int:
        return limit - running


class StaticBatchPolicy:
    """A batch is filled when the instance is empty and runs to completion; for comparison only."""

    joins_together = True

    def may_join(self, running: int, limit: int) -> int:
        return 0 if running else limit
