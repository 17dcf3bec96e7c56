"""One rank's side of the second tier: what the engine tells it between steps, and what it tells of itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.worker.slots import AppliedStep
from services.worker.tier.arrivals import Key
from services.worker.tier.fetcher import Fetcher, Report
from services.worker.tier.homes import TierState
from services.worker.tier.port import KvMemory
from services.worker.tier.rates import PrefillRate, pays
from services.worker.tier.sender import Sender
from services.worker.tier.staging import Staging
from shared.ids import BlockHash
from shared.subjects import tier_row
from shared.tier.client import TierClient
from shared.tier.frames import Link
from shared.wire import Stored, TierOffer

ANSWER_S = 3.0
"""A tier that takes longer over one block is away."""

HYSTERESIS = 1.25
"""What goes to the tier goes on going there until it costs so much more than it saves."""


@dataclass(frozen=True)
class Whose:
    """Which blocks these are: the part of rank `part` of `parts` of a model's."""

    model: str
    part: int = 0
    parts: int = 1


class SecondTier:
    """Nothing here waits for the network, save the two threads it has."""

    def __init__(
        self, memory: KvMemory, whose: Whose, block_tokens: int, blocks_total: int, staging_bytes: int
    ) -> None:
        """Raises ValueError if the staging memory cannot hold what it has to."""
        self.model = whose.model
        self.prefill = PrefillRate(0.0)
        self.staging_bytes = staging_bytes
        self._block_tokens = block_tokens

        def connect(offer: TierOffer) -> TierClient:
            return TierClient(
                offer, whose.model, whose.part, whose.parts, memory.block_bytes, timeout_s=ANSWER_S
            )

        staging = Staging(staging_bytes, memory.block_bytes)
        self._sender = Sender(memory, staging, 4 * blocks_total, connect)
        self._fetcher = Fetcher(memory, staging, whose.model, connect)
        self._fetcher.observe = self._observe
        self._state = TierState()

    def when(self, fetched: Report, reached: Callable[[], None]) -> None:
        """Whom to tell, from any thread, how fetches end here, and that `reached` may have changed."""
        self._fetcher.report = fetched
        self._sender.when_reached = reached

    # What the engine says, on its thread.

    def knows(self, link: Callable[[int], Link]) -> None:
        """`link` tells where in its chain a hashed block is."""
        self._sender.knows(link)

    def use(self, state: TierState, hashed: Callable[[], list[tuple[int, BlockHash]]]) -> None:
        """The tiers there are; `hashed` tells all blocks that can be shared at this moment."""
        self._state = state
        self._fetcher.use(state)
        self._sender.use(state.of(state.home, self.model), state.wanted, hashed() if state.wanted else ())

    def apply(self, work: AppliedStep, session: int) -> None:
        """The frame was applied, and nothing is computed yet."""
        if work.reused and self._state.wanted:
            self._sender.renew(work.reused)
        if work.offload:
            self._sender.urge(work.offload)
        if work.evicted:
            self._sender.give_up(work.evicted)
        if work.fetch:
            self._fetcher.begin(session, work.fetch)

    def stored(self, stored: list[Stored]) -> None:
        """These blocks were confirmed."""
        if self._state.wanted:
            self._sender.offer([(row.block, row.hash) for row in stored])

    def computed(self, tokens: int, seconds: float) -> None:
        """A step with tokens of prompts only."""
        self.prefill.observe(tokens, seconds)

    def end(self, key: Key) -> None:
        """The fetch is over on all ranks: nothing more is written for it."""
        self._fetcher.end(key)

    def begin(self) -> None:
        """A new session: no fetch of the one before writes any more."""
        self._fetcher.end_all()

    def broken(self) -> None:
        """A frame was refused half-way: blocks may have changed hands that it did not come to name."""
        self._fetcher.end_all()
        self._sender.tear()

    def close(self) -> None:
        self._fetcher.close()
        self._sender.close()

    # What it says of itself, to any thread.

    def rates(self) -> tuple[float, float]:
        """(fixed_s, block_s) of a fetch from the tier that blocks go to."""
        return self._sender.rates.fit()

    def wants(self, home: str, so_far: bool) -> bool:
        """Whether blocks are to go to that tier: it was reached, and what it takes to fetch is less than to
        compute again. `so_far`: they do."""
        reached = self._sender.reached
        if reached is None or tier_row(reached.instance, self.model) != home or not self._sender.rates.known:
            return False
        lenience = HYSTERESIS if so_far else 1.0
        return pays(*self.rates(), self._block_tokens, lenience * self.prefill.token_s)

    def report(self) -> dict[str, Any]:
        fixed_s, block_s = self.rates()
        return self._sender.report() | {
            "fetched": self._fetcher.blocks,
            "missed": self._fetcher.failed,
            "fetching": self._fetcher.under_way,
            "fetch_fixed_us": round(fixed_s * 1e6),
            "fetch_block_us": round(block_s * 1e6),
            "compute_block_us": round(self._block_tokens * self.prefill.token_s * 1e6),
        }

    def _observe(self, row: str, blocks: int, seconds: float) -> None:
        if row == self._state.home:
            self._sender.rates.observe(blocks, seconds)
