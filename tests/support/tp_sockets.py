"""Connections between ranks that a test or a benchmark starts by itself."""

import socket
import time

PATIENCE_S = 20.0


def connect_all(rank: int, addresses: list[str], port: int) -> dict[int, socket.socket]:
    """A TCP connection to every other rank; rank r listens on addresses[r], all at the same port."""
    server = socket.create_server((addresses[rank], port), backlog=len(addresses))
    peers: dict[int, socket.socket] = {}
    for other in range(rank):
        peers[other] = _connect(addresses[other], port)
        peers[other].sendall(bytes([rank]))
    while len(peers) < len(addresses) - 1:
        accepted, _ = server.accept()
        peers[accepted.recv(1)[0]] = accepted
    server.close()
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=PATIENCE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            connection.settimeout(None)
            return connection
