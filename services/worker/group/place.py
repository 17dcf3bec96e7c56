"""How a rank above 0 reaches its group: by what rank 0 handed it at its start, or by the rendezvous."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from services.worker.group.channel import Channel
from services.worker.group.handshake import Caller, NotOfTheGroup, Purpose
from services.worker.group.layout import rendezvous_of
from services.worker.group.membership import Membership
from services.worker.group.messages import TO_RANK, Welcome
from services.worker.group.rendezvous import Door, Peers, connect, open_door
from services.worker.settings import WorkerSettings


@dataclass
class Place:
    """A rank that rank 0 can command; `complete` connects it to the others once they are all there."""

    membership: Membership
    channel: Channel
    _door: Door | None = None
    _peers: Peers | None = None

    @property
    def data_port(self) -> int:
        """Where others reach it; 0: they were connected to it by rank 0."""
        return 0 if self._door is None else self._door.port

    def complete(self, welcome: Welcome, settings: WorkerSettings) -> None:
        """Raises `CannotStart`."""
        if self._door is not None and self._peers is not None:
            found = self._peers.connected(welcome.addresses, settings.group_secret, settings.group_start_s)
            self.membership.peers |= found
            self._door.close()


def handed(rank: int, size: int, control: int, peers: Iterable[tuple[int, int]], memory: int | None) -> Place:
    """By descriptors that this process has inherited."""
    sockets = {peer: socket.socket(fileno=fd) for peer, fd in peers}
    return Place(Membership(rank, size, sockets, memory), Channel(socket.socket(fileno=control), TO_RANK))


def met(rank: int, settings: WorkerSettings) -> Place:
    """By the rendezvous, however long node 0 takes to be there. Raises `CannotStart`."""
    secret = settings.group_secret
    sock = connect(
        rendezvous_of(settings), secret, Caller(Purpose.CONTROL, rank), "node 0", settings.group_start_s
    )
    peers = Peers(rank, settings.tp)

    def admit(caller: Caller, sock: socket.socket) -> None:
        if caller.purpose is not Purpose.DATA:
            raise NotOfTheGroup("only node 0 commands ranks")
        peers.take(caller, sock)

    door = open_door(sock.getsockname()[0], 0, secret, admit)
    return Place(Membership(rank, settings.tp), Channel(sock, TO_RANK), door, peers)
