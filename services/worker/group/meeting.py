"""Rank 0's door while a group on several nodes forms: who is let in, who is refused, and why."""

import socket
from collections.abc import Mapping
from types import TracebackType

from services.worker.group.channel import Channel, ChannelLost
from services.worker.group.facts import difference
from services.worker.group.handshake import LIMIT_S, Caller, NotOfTheGroup, Purpose
from services.worker.group.layout import Layout, rendezvous_of
from services.worker.group.members import Members
from services.worker.group.messages import FROM_RANK, Hello, Refusal
from services.worker.group.rendezvous import Peers, open_door
from services.worker.settings import WorkerSettings


class Meeting:
    """Open as long as the `with` lasts. Raises `CannotStart` if nobody can listen at the rendezvous."""

    def __init__(
        self, settings: WorkerSettings, layout: Layout, members: Members, facts: Mapping[str, str]
    ) -> None:
        self._members, self._layout, self._facts = members, layout, facts
        self._at = settings.rendezvous
        self._host, self._port = rendezvous_of(settings)
        self._hosts: dict[int, str] = {}
        self._refused = ""
        self.peers = Peers(0, layout.size)
        """Data connections, once the ranks are welcome."""
        self._door = open_door(self._host, self._port, settings.group_secret, self._admit)

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.close()
        if error is not None:
            self.peers.close()

    def addresses(self) -> list[str]:
        """HOST:PORT of the data connections of every rank that has said hello."""
        found = [f"{self._host}:{self._port}"]
        for rank, member in sorted(self._members.each.items()):
            assert member.hello is not None
            found.append(f"{self._hosts[rank]}:{member.hello.data_port}")
        return found

    def missing(self) -> str:
        """What is said of a rank that is not here."""
        return f"has not connected to {self._at} (nodes={self._layout.nodes}, tp={self._layout.size})"

    def last_refused(self) -> str:
        return f"; last refused: {self._refused}" if self._refused else ""

    def _admit(self, caller: Caller, sock: socket.socket) -> None:
        if caller.purpose is Purpose.DATA:
            self.peers.take(caller, sock)
            return
        channel = Channel(sock, FROM_RANK)
        try:
            hello = channel.receive(LIMIT_S)
        except ChannelLost as error:
            raise NotOfTheGroup(f"rank {caller.rank}: {error}") from None
        if not isinstance(hello, Hello) or hello.rank != caller.rank:
            raise NotOfTheGroup(f"rank {caller.rank} does not begin with hello")
        self._hosts[hello.rank] = sock.getpeername()[0]
        if why := self._against(hello) or self._members.taken(hello, channel):
            self._refused = f"rank {hello.rank} (node {hello.node}, {hello.host}): {why}"
            channel.send(Refusal(self._refused))
            raise NotOfTheGroup(self._refused)

    def _against(self, hello: Hello) -> str:
        """What speaks against letting this rank in; empty: nothing."""
        if differs := difference(hello.facts, self._facts):
            return f"{differs}; start all nodes with the same version, model and settings"
        if hello.rank not in self._members.each or hello.node != self._layout.node_of(hello.rank):
            return f"there is no such rank on node {hello.node}"
        return ""
