"""Names of KV blocks: a chained SHA-256 that is equal on every machine for equal content.

root = SHA-256(wire version, model fingerprint, block size, tenant salt); each full block's hash is
SHA-256(parent hash + token ids as 4-byte little-endian). No seed: two processes that never met agree.
The token ids are covered, so a hit needs no further comparison than the 32 bytes themselves.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

from shared.ids import BlockHash

WIRE_VERSION = 1

HASH_BYTES = 32
"""Of every name."""


def root_hash(fingerprint: str, block_tokens: int, salt: str = "") -> BlockHash:
    """The parent of a sequence's first block. `fingerprint` names weights and KV format; `salt` a tenant."""
    body = f"hortator\0{WIRE_VERSION}\0{fingerprint}\0{block_tokens}\0{salt}"
    return BlockHash(sha256(body.encode()).digest())


def extend(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash of the block that holds `tokens` and follows `parent`."""
    return BlockHash(sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest())


def chain(root: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Hashes of every full block of `tokens`, first to last; a tail shorter than a block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = extend(parent, tokens[start : start + block_tokens])
        hashes.append(parent)
    return hashes


def extend_packed(parent: BlockHash, packed: bytes) -> BlockHash:
    """`extend` for token ids that are already packed as 4-byte little-endian integers."""
    return BlockHash(sha256(parent + packed).digest())
