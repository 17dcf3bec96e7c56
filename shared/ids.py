"""Distinct types for the identifiers that travel between services (design §1)."""

from typing import NewType

InstanceId = NewType("InstanceId", str)
"""One model replica; a NATS subject token: `[A-Za-z0-9_-]{1,64}`."""

ClientId = NewType("ClientId", str)
"""One life of a gateway or internal client; a NATS subject token. A restarted client draws a new one."""

RequestId = NewType("RequestId", str)
"""Unique per client; free text of at most 128 characters, never part of a subject."""

OwnerId = NewType("OwnerId", str)
"""One life of a scheduler process. Breaks ties between equal epochs: the smaller string wins."""

MAX_EPOCH = 2**53
"""Above this an epoch is nonsense: whoever believed it once would refuse every leader to come."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chained SHA-256 of a full, confirmed block (`shared/blocks.py`)."""
