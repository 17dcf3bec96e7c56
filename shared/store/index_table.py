"""Which number in the bitmaps belongs to which instance, as one small value that is replaced whole. Pure."""

from collections.abc import Sequence

import msgspec

from shared.store.port import MAX_NUMBERS, IndexFull


class IndexTable(msgspec.Struct, frozen=True, array_like=True):
    """Live numbers, and retired ones that bitmaps may still carry.

    A number retired while `sweeps` was r may still stand in bitmaps until a sweep that began later, so with
    a number above r, is complete.
    """

    sweeps: int = 0
    """Sweeps begun so far."""
    live: dict[str, tuple[int, int]] = {}
    """instance → (number, born)"""
    retired: list[tuple[int, int]] = []
    """(number, value of `sweeps` when it retired)"""

    def begin(self, instance: str, born: int) -> tuple["IndexTable", int]:
        """A fresh number for the instance; its former one retires. Raises `IndexFull`."""
        rest = self.retire(instance)
        used = {number for number, _ in rest.live.values()} | {number for number, _ in rest.retired}
        number = next((n for n in range(MAX_NUMBERS) if n not in used), None)
        if number is None:
            raise IndexFull(f"all {MAX_NUMBERS} instance numbers are in use or wait for a sweep")
        return IndexTable(rest.sweeps, {**rest.live, instance: (number, born)}, rest.retired), number

    def retire(self, instance: str) -> "IndexTable":
        if instance not in self.live:
            return self
        live = dict(self.live)
        number, _ = live.pop(instance)
        return IndexTable(self.sweeps, live, [*self.retired, (number, self.sweeps)])

    def sweep_begins(self) -> "IndexTable":
        return IndexTable(self.sweeps + 1, self.live, self.retired)

    def sweep_ends(self) -> "IndexTable":
        """Numbers retired before the sweep in progress began are clean now."""
        return IndexTable(self.sweeps, self.live, [(n, at) for n, at in self.retired if at >= self.sweeps])

    def owners(self) -> dict[int, str]:
        return {number: instance for instance, (number, _) in self.live.items()}

    def numbers(self) -> dict[str, int]:
        return {instance: number for instance, (number, _) in self.live.items()}

    def live_bits(self) -> bytes:
        """Bitmap of live numbers in SETBIT's order: number 0 is the highest bit of the first byte."""
        bits = bytearray(max((number for number, _ in self.live.values()), default=0) // 8 + 1)
        for number, _ in self.live.values():
            bits[number >> 3] |= 0x80 >> (number & 7)
        return bytes(bits)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(IndexTable)


def encode_table(table: IndexTable) -> bytes:
    return _encoder.encode(table)


def decode_table(raw: bytes | None) -> IndexTable:
    """An unreadable table is an empty one: everything in the store is a hint and is built anew."""
    if not raw:
        return IndexTable()
    try:
        table = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return IndexTable()
    numbers = [number for number, _ in table.live.values()] + [number for number, _ in table.retired]
    if any(not 0 <= number < MAX_NUMBERS for number in numbers) or len(set(numbers)) < len(numbers):
        return IndexTable()
    return table


def prefix_depths(bitmaps: Sequence[bytes | None], owners: dict[int, str]) -> dict[str, int]:
    """How many leading blocks of a chain each owner holds, those without any left out.

    `bitmaps[i]` tells who holds block i, number n being bit n in SETBIT's order; None: nobody.
    """
    if not owners:
        return {}
    width = (max(owners) >> 3) + 1
    top = 8 * width - 1
    held = sum(1 << (top - number) for number in owners)
    depths: dict[str, int] = {}
    last: bytes | None = b""
    # The end of the chain ends every run.
    for depth, bitmap in enumerate([*bitmaps, None]):
        # Along a prompt neighbouring blocks mostly have the same holders.
        if bitmap == last:
            continue
        last = bitmap
        still = held & int.from_bytes(bitmap[:width].ljust(width, b"\0"), "big") if bitmap else 0
        lost = held ^ still
        while depth and lost:
            bit = lost.bit_length() - 1
            lost ^= 1 << bit
            depths[owners[top - bit]] = depth
        if not still:
            break
        held = still
    return depths
