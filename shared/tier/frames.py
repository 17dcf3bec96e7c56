"""The bytes between a worker's rank and a second tier over TCP: proof, hello, requests, answers. Pure.

```
tier → rank   MAGIC, nonce                                      as soon as it is connected
rank → tier   MAGIC, nonce, proof of the secret; hello          nothing else is read before the proof is right
tier → rank   proof of the secret; status, length, text
rank → tier   request header, body                              one at a time
tier → rank   its answer
```

Every length follows from a checked header: no memory is taken for what a peer merely claims.
"""

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"hortier1"
NONCE_BYTES = 32
PROOF_BYTES = 32
HASH_BYTES = 32
DIGEST_BYTES = 32
LEASE_BYTES = 16

MAX_HASHES = 4096
"""Of one request; a longer chain takes several."""
MAX_MODEL_BYTES = 256
MAX_PARTS = 1024
MAX_BLOCK_BYTES = 1 << 30
MAX_TEXT_BYTES = 1024
MAX_LEASE_S = 600.0

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
OPENING_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES

_HELLO = struct.Struct("<HHQH")
_WELCOME = struct.Struct("<BH")
_REQUEST = struct.Struct("<BxHxxxxQ")
_LEASE = struct.Struct(f"<{LEASE_BYTES}sI")
_COUNT = struct.Struct("<I")
_LINK = struct.Struct(f"<{HASH_BYTES}sI")
_BLOCK = struct.Struct(f"<B{DIGEST_BYTES}s")

HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
REQUEST_BYTES = _REQUEST.size
COUNT_BYTES = _COUNT.size
BLOCK_BYTES = _BLOCK.size
PUT_HEAD_BYTES = HASH_BYTES + DIGEST_BYTES + _LINK.size


class Link(NamedTuple):
    """Where in its chain a block is: what keeps a tier from losing the beginning of a chain first."""

    parent: bytes = bytes(HASH_BYTES)
    """Hash of the block before it; of the first, the root of its hashes."""
    depth: int = 0
    """Blocks before it."""


NO_LINK = Link()
"""Nothing is known."""


class BadTierFrame(ValueError):
    """The peer does not speak this protocol, or lies about lengths: the connection has to end."""


class Op(IntEnum):
    HAVE = 1
    PUT = 2
    GET = 3
    PIN = 4
    RELEASE = 5


class Put(IntEnum):
    """How a `PUT` ended."""

    STORED = 1
    HAD = 2
    """It was there before."""
    FULL = 3
    """Nothing may leave for it now (pinned, in use, or arriving elsewhere)."""
    WRONG = 4
    """What arrived does not have the digest it came with."""

    @property
    def kept(self) -> bool:
        return self in (Put.STORED, Put.HAD)


@dataclass(frozen=True)
class Hello:
    """Whose blocks a connection is about: those of one rank of the groups that serve a model."""

    model: str
    part: int
    parts: int
    block_bytes: int


@dataclass(frozen=True)
class Request:
    """A checked header. `body_bytes` follow it; of a `PUT` only what comes before the block."""

    op: Op
    count: int
    body_bytes: int


# --- who may speak ----------------------------------------------------------------------------------------


def greeting(nonce: bytes) -> bytes:
    return MAGIC + nonce


def read_greeting(raw: bytes) -> bytes:
    """The tier's nonce. Raises `BadTierFrame`."""
    if raw[: len(MAGIC)] != MAGIC:
        raise BadTierFrame("it does not speak the protocol of the second tier")
    return raw[len(MAGIC) :]


def opening(secret: str, tier_nonce: bytes, nonce: bytes) -> bytes:
    return MAGIC + nonce + prove(secret, b"rank", tier_nonce, nonce)


def check_opening(raw: bytes, secret: str, tier_nonce: bytes) -> bytes:
    """The rank's nonce. Raises `BadTierFrame` unless it knows the secret."""
    nonce = raw[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
    expected = MAGIC + nonce + prove(secret, b"rank", tier_nonce, nonce)
    if len(raw) != OPENING_BYTES or not hmac.compare_digest(raw, expected):
        raise BadTierFrame("it does not know the secret of this tier")
    return nonce


def prove(secret: str, side: bytes, tier_nonce: bytes, rank_nonce: bytes) -> bytes:
    """Each side's proof covers both nonces, so that none can be heard once and used again."""
    return hmac.digest(secret.encode(), side + tier_nonce + rank_nonce, "sha256")


def check_tier(proof: bytes, secret: str, tier_nonce: bytes, nonce: bytes) -> None:
    """Raises `BadTierFrame` unless whoever listens there is the tier that made the offer."""
    if not hmac.compare_digest(proof, prove(secret, b"tier", tier_nonce, nonce)):
        raise BadTierFrame("whoever listens there does not know the secret of this tier")


# --- hello ------------------------------------------------------------------------------------------------


def hello(said: Hello) -> bytes:
    name = said.model.encode()
    if not name or len(name) > MAX_MODEL_BYTES:
        raise ValueError(f"a model's name has 1 to {MAX_MODEL_BYTES} bytes, not {len(name)}")
    return _HELLO.pack(said.part, said.parts, said.block_bytes, len(name)) + name


def model_bytes(head: bytes) -> int:
    """How many bytes of a name follow the hello's head. Raises `BadTierFrame`."""
    length: int = _HELLO.unpack(head)[3]
    if not 1 <= length <= MAX_MODEL_BYTES:
        raise BadTierFrame(f"a model's name of {length} bytes")
    return length


def read_hello(head: bytes, name: bytes) -> Hello:
    """Raises `BadTierFrame`."""
    part, parts, block_bytes, _ = _HELLO.unpack(head)
    if not 1 <= parts <= MAX_PARTS or part >= parts:
        raise BadTierFrame(f"part {part} of {parts}")
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        raise BadTierFrame(f"blocks of {block_bytes} bytes")
    try:
        return Hello(name.decode(), part, parts, block_bytes)
    except UnicodeDecodeError:
        raise BadTierFrame("a model's name that is not UTF-8") from None


def welcome(refusal: str = "") -> bytes:
    """Empty: come in; else why not, for a person to read."""
    text = refusal.encode()[:MAX_TEXT_BYTES]
    return _WELCOME.pack(not refusal, len(text)) + text


def read_welcome(head: bytes) -> tuple[bool, int]:
    """Whether we may come in, and the bytes of text that follow. Raises `BadTierFrame`."""
    status, length = _WELCOME.unpack(head)
    if status > 1 or length > MAX_TEXT_BYTES:
        raise BadTierFrame("a welcome that is none")
    return bool(status), length


# --- requests ---------------------------------------------------------------------------------------------


def have_request(hashes: Sequence[bytes]) -> bytes:
    return _with_hashes(Op.HAVE, hashes)


def get_request(hashes: Sequence[bytes]) -> bytes:
    return _with_hashes(Op.GET, hashes)


def put_request(block_hash: bytes, digest: bytes, block_bytes: int, link: Link = NO_LINK) -> bytes:
    """Followed by the block's bytes."""
    _check_hashes([block_hash, link.parent])
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return _REQUEST.pack(Op.PUT, 1, PUT_HEAD_BYTES + block_bytes) + block_hash + digest + _LINK.pack(*link)


def read_put_head(body: bytes) -> tuple[bytes, bytes, Link]:
    """Hash, digest, and where in its chain the block is."""
    start = HASH_BYTES + DIGEST_BYTES
    return body[:HASH_BYTES], body[HASH_BYTES:start], Link(*_LINK.unpack_from(body, start))


def pin_request(lease: bytes, lease_s: float, hashes: Sequence[bytes]) -> bytes:
    if len(lease) != LEASE_BYTES or not 0 < lease_s <= MAX_LEASE_S:
        raise ValueError(f"a lease has a name of {LEASE_BYTES} bytes and lasts at most {MAX_LEASE_S:.0f} s")
    return _with_hashes(Op.PIN, hashes, _LEASE.pack(lease, max(1, round(lease_s * 1000))))


def release_request(lease: bytes) -> bytes:
    if len(lease) != LEASE_BYTES:
        raise ValueError(f"a lease has a name of {LEASE_BYTES} bytes, not {len(lease)}")
    return _REQUEST.pack(Op.RELEASE, 0, LEASE_BYTES) + lease


def _with_hashes(op: Op, hashes: Sequence[bytes], before: bytes = b"") -> bytes:
    _check_hashes(hashes)
    body = before + b"".join(hashes)
    return _REQUEST.pack(op, len(hashes), len(body)) + body


def _check_hashes(hashes: Sequence[bytes]) -> None:
    if len(hashes) > MAX_HASHES or any(len(each) != HASH_BYTES for each in hashes):
        raise ValueError(f"a request names at most {MAX_HASHES} hashes of {HASH_BYTES} bytes each")


def read_request(head: bytes, block_bytes: int) -> Request:
    """Raises `BadTierFrame` for an unknown operation, too many hashes, or a length that does not fit both."""
    number, count, length = _REQUEST.unpack(head)
    try:
        op = Op(number)
    except ValueError:
        raise BadTierFrame(f"an unknown operation {number}") from None
    if count > MAX_HASHES:
        raise BadTierFrame(f"{count} hashes in one request; {MAX_HASHES} are allowed")
    body = {
        Op.HAVE: count * HASH_BYTES,
        Op.GET: count * HASH_BYTES,
        Op.PUT: PUT_HEAD_BYTES,
        Op.PIN: _LEASE.size + count * HASH_BYTES,
        Op.RELEASE: LEASE_BYTES,
    }[op]
    if length != (body + block_bytes if op is Op.PUT else body):
        raise BadTierFrame(f"{op.name} of {count} hashes with {length} bytes")
    return Request(op, count, body)


def split_hashes(body: bytes) -> list[bytes]:
    return [body[i : i + HASH_BYTES] for i in range(0, len(body), HASH_BYTES)]


def read_pin(body: bytes) -> tuple[bytes, float, list[bytes]]:
    """Lease, seconds, hashes. Raises `BadTierFrame`."""
    lease, milliseconds = _LEASE.unpack_from(body)
    if not 0 < milliseconds <= MAX_LEASE_S * 1000:
        raise BadTierFrame(f"a lease of {milliseconds} ms")
    return lease, milliseconds / 1000, split_hashes(body[_LEASE.size :])


# --- answers ----------------------------------------------------------------------------------------------


def have_answer(there: Sequence[bool]) -> bytes:
    return bytes(there)


def read_have(raw: bytes) -> list[bool]:
    return [each == 1 for each in raw]


def put_answer(ended: Put) -> bytes:
    return bytes([ended])


def read_put(raw: bytes) -> Put:
    """Raises `BadTierFrame`."""
    try:
        return Put(raw[0])
    except ValueError:
        raise BadTierFrame(f"an unknown end of a put: {raw[0]}") from None


def block_head(digest: bytes | None) -> bytes:
    """Before each block of an answer to `GET`; None: this one is not there, and none follow."""
    return _BLOCK.pack(0, b"") if digest is None else _BLOCK.pack(1, digest)


def read_block_head(raw: bytes) -> bytes | None:
    """Raises `BadTierFrame`."""
    there, digest = _BLOCK.unpack(raw)
    if there > 1:
        raise BadTierFrame("a block's head that is none")
    return digest if there else None


def count_answer(count: int) -> bytes:
    return _COUNT.pack(count)


def read_count(raw: bytes) -> int:
    count: int = _COUNT.unpack(raw)[0]
    return count
