"""The other ranks as rank 0 knows them: what each has said, and whether, how and when one ended.

A thread of its own listens to all of them, so that a loss is noticed within milliseconds, also when nothing
is computed.
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from services.worker.collective.port import GroupLost
from services.worker.group.channel import Channel, ChannelLost
from services.worker.group.messages import Built, Failed, Hello, Message, Part, Welcome, encode

EXPLAIN_S = 0.5
"""How long the exit status of a rank whose connection ended may take to come."""

NEWS_EVERY_S = 10.0


@dataclass(eq=False)
class Member:
    """A rank other than 0. `process` if this process started it."""

    rank: int
    node: int = 0
    channel: Channel | None = None
    process: "subprocess.Popen[bytes] | None" = None
    hello: Hello | None = None
    built: Built | None = None
    reason: str = ""
    """Why it ended, as far as it said."""

    def __str__(self) -> str:
        if self.node:
            where = f", {self.hello.host}, pid {self.hello.pid}" if self.hello else ""
            return f"rank {self.rank} (node {self.node}{where})"
        return f"rank {self.rank}" + (f" (pid {self.process.pid})" if self.process else "")

    def exit_status(self, wait_s: float) -> str:
        """How the process ended; empty if it is not ours, or has not."""
        if self.process is None:
            return ""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


class Members:
    """`abort(reason)` is called once, from the listening thread, with the first that is known of a loss."""

    def __init__(self, nodes: Mapping[int, int], abort: Callable[[str], None]) -> None:
        """`nodes`: rank → its node, of all but rank 0."""
        self.each = {rank: Member(rank, node) for rank, node in nodes.items()}
        self.lost: GroupLost | None = None
        """The loss with all that is known of it."""
        self._abort = abort
        self._when_lost: Callable[[GroupLost], None] | None = None
        self._when_fetched: Callable[[int, tuple[int, int], int, int], None] | None = None
        self._aborted = False
        self._welcome = self._closing = self._over = False
        self._changed = threading.Condition()
        self._poll = select.epoll()
        self._by_fd: dict[int, Member] = {}
        self._pidfds: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._listen, name="group", daemon=True)
        self._thread.start()

    def started(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """From now on its end is a loss, said hello or not."""
        member = self.each[rank]
        with self._changed:
            member.process = process
            pidfd = os.pidfd_open(process.pid)
            self._pidfds.add(pidfd)
            self._by_fd[pidfd] = member
        self._poll.register(pidfd, select.EPOLLIN)

    def connected(self, rank: int, channel: Channel) -> None:
        """It was handed this connection, and has not said anything yet."""
        with self._changed:
            self._listen_to(self.each[rank], channel)

    def taken(self, hello: Hello, channel: Channel) -> str:
        """A rank that has connected by itself; why it cannot be taken, else empty."""
        member = self.each[hello.rank]
        with self._changed:
            if member.hello is not None:
                return f"this rank is here already, from {member.hello.host} (pid {member.hello.pid})"
            member.hello = hello
            self._listen_to(member, channel)
            self._changed.notify_all()
        return ""

    def welcome(self, message: Welcome) -> None:
        """The group is complete: from now on the end of any rank is its loss. Raises `GroupLost`."""
        with self._changed:
            self._welcome = True
        self.send(message)

    def send(self, message: Message) -> None:
        """To every rank. Raises `GroupLost` if one cannot be reached or does not keep up."""
        body = encode(message)
        for member in self.each.values():
            try:
                if member.channel is None:
                    raise ChannelLost("its connection ended")
                member.channel.send_encoded(body)
            except ChannelLost as error:
                self._lose(member, str(error))
                raise self.explained(GroupLost(f"{member}: {error}")) from None

    def tell_all(self, message: Message) -> None:
        """To every rank that is still there."""
        for member in self.each.values():
            if member.channel is not None:
                with contextlib.suppress(ChannelLost):
                    member.channel.send(message)

    def until(self, done: Callable[[Member], Any], missing: str, limit_s: float) -> None:
        """Wait until all are `done`; logs every ten seconds who is not. Raises `GroupLost`, TimeoutError."""
        began = news_at = time.monotonic()
        log = structlog.get_logger()
        with self._changed:
            while left := [member for member in self.each.values() if not done(member)]:
                self.check()
                now = time.monotonic()
                names = ", ".join(str(member) for member in left)
                if now > began + limit_s:
                    raise TimeoutError(f"{names}: {missing} within {limit_s:.0f} s")
                if now >= news_at + NEWS_EVERY_S:
                    news_at = now
                    log.info("waiting for ranks", missing=names, waited_s=round(now - began), why=missing)
                self._changed.wait(min(NEWS_EVERY_S, began + limit_s - now + 0.01))

    def check(self) -> None:
        if self.lost is not None:
            raise GroupLost(str(self.lost))

    def explained(self, error: GroupLost) -> GroupLost:
        """What is known of a loss that was noticed in another way, as in a collective: who ended, and how."""
        deadline = time.monotonic() + EXPLAIN_S
        with self._changed:
            while self.lost is None and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return GroupLost(str(self.lost or error))

    def when_lost(self, then: Callable[[GroupLost], None]) -> None:
        """`then` is called once, from another thread or at once, should the group be lost."""
        with self._changed:
            self._when_lost, lost = then, self.lost
        if lost is not None:
            then(lost)

    def when_fetched(self, then: Callable[[int, tuple[int, int], int, int], None]) -> None:
        """`then` is called from another thread with (rank, fetch, blocks, microseconds) of ranks' `Part`s."""
        self._when_fetched = then

    def expect_ends(self) -> None:
        """Whoever ends from now on is no loss."""
        with self._changed:
            self._closing = True

    def close(self, grace_s: float) -> None:
        """Wait for the ranks to end, kill those of this machine that do not, forget all. Idempotent."""
        with self._changed:
            self._closing = True
            if self._over:
                return
            deadline = time.monotonic() + grace_s
            while (left_s := deadline - time.monotonic()) > 0 and self._by_fd:
                self._changed.wait(left_s)
            self._over = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for member in self.each.values():
            if member.process is not None:
                try:
                    member.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    member.process.wait()
            if member.channel is not None:
                member.channel.close()
        for fd in (*self._pidfds, self._wake):
            os.close(fd)
        self._poll.close()

    # The listening thread.

    def _listen(self) -> None:
        while not self._over:
            for fd, _ in self._poll.poll():
                member = self._by_fd.get(fd)
                if member is not None:
                    self._look(fd, member)

    def _look(self, fd: int, member: Member) -> None:
        if fd in self._pidfds:
            # What it said last is worth more than how it ended.
            why = self._drain(member) or "ended"
        elif not (why := self._drain(member)):
            return
        self._lose(member, why)

    def _drain(self, member: Member) -> str:
        """Take what it said; why it cannot say more, else empty."""
        channel = member.channel
        if channel is None or channel.fileno() < 0:
            return ""
        try:
            while (message := channel.received()) is not None:
                with self._changed:
                    match message:
                        case Hello():
                            member.hello = message
                        case Built():
                            member.built = message
                        case Failed():
                            # Nothing is computed any more, though it may take a while to end.
                            member.reason = message.reason
                            return message.reason
                        case Part(session, op, count, us):
                            if self._when_fetched is not None:
                                self._when_fetched(member.rank, (session, op), count, us)
                    self._changed.notify_all()
        except ChannelLost as error:
            return str(error)
        return ""

    def _listen_to(self, member: Member, channel: Channel) -> None:
        member.channel = channel
        self._by_fd[channel.fileno()] = member
        self._poll.register(channel.fileno(), select.EPOLLIN)

    def _lose(self, member: Member, why: str) -> None:
        with self._changed:
            for fd in [fd for fd, of in self._by_fd.items() if of is member]:
                self._poll.unregister(fd)
                del self._by_fd[fd]
            self._changed.notify_all()
            if not self._welcome and member.node and member.channel is not None:
                # It may come again as long as others are waited for.
                structlog.get_logger().warning(
                    "a rank has left again", rank=str(member), why=member.reason or why
                )
                member.channel.close()
                member.channel = member.hello = None
                return
            first = not (self._aborted or self._closing)
            self._aborted = self._aborted or first
        if not first:
            return
        # Whoever waits in a collective is freed first; how the process ended may take a moment to be known.
        self._abort(f"{member}: {why}")
        status = "" if member.reason else member.exit_status(EXPLAIN_S)
        reason = f"{member} {status}" if status else f"{member}: {why}"
        with self._changed:
            self.lost = GroupLost(reason)
            self._changed.notify_all()
            then = self._when_lost
        if then is not None:
            then(self.lost)
