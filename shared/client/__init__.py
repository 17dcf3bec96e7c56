"""The client side of the mesh: a pure core (`core`) and its shell on a bus (`mesh`)."""

from shared.client.core import ClientCore
from shared.client.effects import (
    Accepted,
    Close,
    Counts,
    Effect,
    Ended,
    Event,
    Open,
    Progress,
    Refused,
    Tick,
    Unsendable,
)
from shared.client.mesh import MeshClient, Sink
from shared.client.records import OpenRequest, OpenSeq

__all__ = [
    "Accepted",
    "ClientCore",
    "Close",
    "Counts",
    "Effect",
    "Ended",
    "Event",
    "MeshClient",
    "Open",
    "OpenRequest",
    "OpenSeq",
    "Progress",
    "Refused",
    "Sink",
    "Tick",
    "Unsendable",
]
