"""The bus as a person at the desk uses it: raw frames, and questions that several services answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.bus.port import BusDown


class Denied(PermissionError):
    """The broker does not let this user do that."""


class Desk:
    """One short-lived connection with an operator's credentials. Make it with `Desk.connect`."""

    def __init__(self) -> None:
        self._client = Client()
        self._denied: asyncio.Queue[str] = asyncio.Queue()

    @classmethod
    async def connect(cls, url: str, user: str, password: str, timeout_s: float = 3.0) -> "Desk":
        """Raises `BusDown` when there is no session within `timeout_s`."""
        desk = cls()
        attempt = desk._client.connect(
            url,
            user=user,
            password=password,
            name=f"desk/{user}",
            inbox_prefix=f"_INBOX.{user}".encode(),
            error_cb=desk._on_error,
            allow_reconnect=False,
        )
        try:
            await asyncio.wait_for(attempt, timeout_s)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            with suppress(Exception):
                await desk._client.close()
            raise BusDown(f"no session with NATS at {url} as {user}: {error!r}") from None
        return desk

    async def frames(self, subject: str) -> AsyncIterator[tuple[datetime, str, bytes]]:
        """(time of arrival, subject, payload) of every frame. Ends when the broker does. Raises `Denied`."""
        arrived: asyncio.Queue[tuple[datetime, str, bytes] | None] = asyncio.Queue()

        async def keep(message: Msg) -> None:
            arrived.put_nowait((datetime.now(UTC), message.subject, message.data))

        await self._client.subscribe(subject, cb=keep)
        await self._client.flush()
        while self._client.is_connected:
            if not self._denied.empty():
                raise Denied(self._denied.get_nowait())
            try:
                frame = await asyncio.wait_for(arrived.get(), 0.5)
            except TimeoutError:
                continue
            if frame is not None:
                yield frame

    async def ask_all(self, subject: str, wait_s: float = 0.3) -> list[bytes]:
        """Every answer to an empty request: those within `wait_s` after the last one (1 s for the first)."""
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        async def keep(message: Msg) -> None:
            if message.data or not message.headers:  # a bare header says that nobody listens
                answers.put_nowait(message.data)

        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=keep)
        await self._client.publish(subject, b"", reply=inbox)
        got: list[bytes] = []
        with suppress(TimeoutError):
            got.append(await asyncio.wait_for(answers.get(), 1.0))
            while True:
                got.append(await asyncio.wait_for(answers.get(), wait_s))
        with suppress(nats.errors.Error):
            await subscription.unsubscribe()
        return got

    async def close(self) -> None:
        with suppress(Exception):
            await self._client.close()

    async def _on_error(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            self._denied.put_nowait(str(error))
