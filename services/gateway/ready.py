"""Whether the mesh answers: a canary of two tokens through the whole path, unless real tokens prove it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelCard
from shared.client import MeshClient, Open, OpenRequest, OpenSeq
from shared.wire import Answer, EndRow, Sampling

RETRY_S = 0.5
"""Between canaries while the mesh does not answer."""
PRIORITY = -1_000_000
"""Before everything else: it asks for two tokens and must not wait behind a queue."""


@dataclass(frozen=True)
class Readiness:
    ok: bool
    reason: str


class Canary:
    """Sends canaries and remembers what became of them. A sink of the mesh client."""

    def __init__(self, client: MeshClient, card: ModelCard, settings: GatewaySettings) -> None:
        self._client = client
        self._settings = settings
        ids = card.tokenizer.encode("Hello", add_special_tokens=True).ids
        self._prompt = ids or [0]
        self._proved_at = -1e9
        self._failure = "no request of its own, a canary, has gone through yet"
        self._failed_at = -1e9
        self._pending = ""
        self._sent = 0
        self.draining = False

    def readiness(self) -> Readiness:
        if self.draining:
            return Readiness(False, "draining: this gateway takes no new requests")
        last = max(self._proved_at, self._client.progress_at)
        age = self._client.now() - last
        patience = self._settings.canary_timeout_s + self._settings.canary_interval_s
        if last > 0 and age <= patience and self._failed_at <= last:
            return Readiness(True, "")
        if self._client.core.epoch == 0:
            return Readiness(False, "no scheduler leads: no beacon was heard")
        return Readiness(False, self._failure)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = self._client.now()
            quiet = now - max(self._proved_at, self._client.progress_at)
            if quiet >= self._settings.canary_interval_s and not self._pending:
                self._send()
            await asyncio.sleep(min(RETRY_S, self._settings.canary_interval_s))

    def _send(self) -> None:
        self._sent += 1
        self._pending = f"canary-{self._sent}"
        self._client.open(
            Open(
                request_id=self._pending,
                prompt=self._prompt,
                sampling=Sampling(max_tokens=2, temperature=0.0),
                sinks=(self,),
                priority=PRIORITY,
                timeout_s=self._settings.canary_timeout_s,
                queue_timeout_s=self._settings.canary_timeout_s,
            )
        )

    def accepted(self, request: OpenRequest) -> None:
        """Being accepted proves nothing."""

    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None:
        """The client notes the time of every token; the end decides."""

    def ended(self, seq: OpenSeq, end: EndRow) -> None:
        self._pending = ""
        if end.reason in ("stop", "length"):
            self._proved_at = self._client.now()
        else:
            self._failed(f"the canary ended in {end.reason}: {end.message or 'no reason given'}")

    def refused(self, request: OpenRequest, answer: Answer) -> None:
        self._pending = ""
        self._failed(f"the canary was refused ({answer.code}): {answer.message or 'no reason given'}")

    def _failed(self, reason: str) -> None:
        self._failure = reason
        self._failed_at = self._client.now()
