"""The generating endpoints: from an HTTP request to a `Generation`, and the life of the gateway itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from services.gateway import schema
from services.gateway.errors import INTERNAL_ERROR, ApiError
from services.gateway.generation import Generation
from services.gateway.incoming import Incoming
from services.gateway.metrics import GatewayMetrics
from services.gateway.outlet import Flusher, Outlet
from services.gateway.plan import Plan, Planner
from services.gateway.ready import Canary
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelCard
from shared.client import MeshClient

log = structlog.get_logger()

_PING_CHECK_S = 1.0
_STOP_POLL_S = 0.02


class Gateway:
    """Everything behind the routes. `start` and `stop` it on the loop it was made on."""

    def __init__(
        self, settings: GatewaySettings, card: ModelCard, client: MeshClient, registry: CollectorRegistry
    ) -> None:
        self.settings = settings
        self.card = card
        self.client = client
        self.planner = Planner(card, settings.max_choices)
        self._open: set[Generation] = set()
        self.metrics = GatewayMetrics(registry, card.name, self._counts)
        self.canary = Canary(client, card, settings)
        self.flusher = Flusher()
        self.draining = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.client.start()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self.canary.run()), loop.create_task(self._ping())]

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let open ones finish within `grace_s`, end the rest with an error, close."""
        self.draining = self.canary.draining = True
        deadline = self.client.now() + grace_s
        while self._open and self.client.now() < deadline:
            await asyncio.sleep(_STOP_POLL_S)
        for generation in list(self._open):
            message = "The server is shutting down."
            generation.fail(ApiError(503, message, code="shutting_down", retry_after_s=1.0))
        # One round for the last writes and the cancels to leave.
        await asyncio.sleep(_STOP_POLL_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def _counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        running = sum(generation.has_tokens for generation in self._open)
        return running, len(self._open) - running

    async def completions(self, incoming: Incoming, send: Any, tenant: str) -> None:
        """POST /v1/completions."""
        await self._serve(incoming, send, tenant, schema.COMPLETION, self.planner.completion)

    async def chat(self, incoming: Incoming, send: Any, tenant: str) -> None:
        """POST /v1/chat/completions."""
        await self._serve(incoming, send, tenant, schema.CHAT, self.planner.chat)

    async def _serve(
        self,
        incoming: Incoming,
        send: Any,
        tenant: str,
        bodies: schema.Body,
        plan_of: Callable[[Any, str], Awaitable[Plan]],
    ) -> None:
        received_at = self.client.now()
        settings = self.settings
        headers = [(b"x-request-id", incoming.request_id)]
        outlet = Outlet(send, self.flusher, headers, settings.max_unread_bytes)
        try:
            self._admit()
            raw = await incoming.body(settings.max_body_bytes, settings.body_timeout_s)
            body = bodies.decode(raw)
            if settings.log_level == "debug" and (unknown := bodies.unknown(raw)):
                log.debug("unknown fields ignored", fields=unknown, request_id=incoming.request_id.decode())
            plan = await plan_of(body, tenant)
            # Reading and encoding took time in which others may have come.
            self._admit()
            generation = Generation(
                plan,
                outlet,
                self.card,
                self.client,
                self.metrics,
                received_at=received_at,
                timeouts=(settings.request_timeout_s, settings.queue_timeout_s),
                with_timing=incoming.with_timing,
                on_error=lambda error: self.note_error(error, incoming),
            )
        except ApiError as error:
            self.note_error(error, incoming)
            outlet.refuse(error)
            return
        except Exception as bug:
            log.error("request failed", exc_info=bug, request_id=incoming.request_id.decode())
            outlet.refuse(INTERNAL_ERROR)
            return
        self._open.add(generation)
        try:
            generation.begin()
            await incoming.disconnect()
        finally:
            generation.abandon()
            self._open.discard(generation)

    def note_error(self, error: ApiError, incoming: Incoming) -> None:
        """Count it, and log it: as a warning what is our fault, else for debugging only."""
        self.metrics.http_error(error.status, error.code)
        level = log.warning if error.status >= 500 else log.debug
        level(
            "request refused",
            status=error.status,
            code=error.code,
            param=error.param,
            path=incoming.path,
            request_id=incoming.request_id.decode(),
        )

    def _admit(self) -> None:
        if self.draining:
            message = "The server is shutting down."
            raise ApiError(503, message, code="shutting_down", retry_after_s=1.0)
        if len(self._open) >= self.settings.max_open_requests:
            message = f"The gateway holds {len(self._open)} requests already. Try again later."
            raise ApiError(429, message, code="queue_full", retry_after_s=1.0)

    async def _ping(self) -> None:
        """Comments into idle streams. A stream that has not begun begins with one."""
        while True:
            await asyncio.sleep(min(_PING_CHECK_S, self.settings.ping_s / 2))
            now = self.client.now()
            for generation in list(self._open):
                generation.ping_if_idle(now, self.settings.ping_s)
