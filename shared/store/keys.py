"""The one table of Redis keys: what stands under each, and when it goes away.

    hortator:<model>:lease          "<epoch> <owner>" of the scheduler that leads; its TTL (2 s)
    hortator:<model>:epoch          highest "<epoch> <owner>" ever written; `EPOCH_TTL_S` after a write
    hortator:hold:<name>            owner of a duty that one process has at a time; its TTL
    hortator:<model>:instance:<id>  health record of an instance; three heartbeats
    hortator:<model>:instances      set of ids that may have a record; `TABLE_TTL_S`
    hortator:<model>:index          msgpack: each instance's number in the bitmaps; `TABLE_TTL_S`
    hortator:<model>:live           bitmap of the numbers in use; `TABLE_TTL_S`
    hortator:<model>:rows           hash: number → token of the row that has it, or had it last; `TABLE_TTL_S`
    hortator:<model>:b:<16 bytes>   bitmap: which instances hold this block; `BLOCK_TTL_S` after add or sweep

Every key has an expiry, so memory is bounded by what live instances hold, also when kvstore never returns.
`<model>` is made a plain token, so that it cannot act as a pattern. A user needs read, write, scripting and
connection commands on `hortator:*` and none of `@dangerous`. Not for Redis Cluster, whose scripts may touch
keys of one slot only.
"""

from shared.subjects import subject_token

BLOCK_TTL_S = 900
TABLE_TTL_S = 2 * BLOCK_TTL_S
"""Longer than any bitmap lives, so that a number is never given anew while old bits still carry it."""
EPOCH_TTL_S = 30 * 86400
HASH_BYTES = 16
"""Leading bytes of a block hash used as key; entries are hints, and 2^-128 is no collision to fear."""

PREFIX = "hortator"


def lease(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:lease"


def epoch(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:epoch"


def hold(name: str) -> str:
    return f"{PREFIX}:hold:{subject_token(name)}"


def instance(model: str, instance_id: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:instance:{instance_id}"


def instances(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:instances"


def index(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:index"


def live(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:live"


def rows(model: str) -> str:
    return f"{PREFIX}:{subject_token(model)}:rows"


def block_prefix(model: str) -> bytes:
    return f"{PREFIX}:{subject_token(model)}:b:".encode()
