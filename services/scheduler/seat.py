"""Where a waiting sequence would find its beginning on an instance, and whether the rest has room."""

from dataclasses import dataclass
from functools import lru_cache

from services.scheduler.admission import Reservation, peak_growth
from services.scheduler.instances import Instance
from services.scheduler.sequences import Sequence
from shared.blocks import chain, root_hash
from shared.ids import BlockHash

_root = lru_cache(1024)(root_hash)


class Seat:
    """Of one sequence on one instance."""

    __slots__ = ("cached", "copy_from", "fits", "need", "reserve", "shared")

    def __init__(self, shared: list[int], copy_from: int, cached: int) -> None:
        self.shared = shared
        self.copy_from = copy_from
        """Block to copy on write, or -1: the whole sequence is cached and its last id is computed again."""
        self.cached = cached
        self.need = 0
        """Blocks to take now."""
        self.reserve = 0
        """Blocks to set aside for expected output."""
        self.fits = False


@dataclass(frozen=True, slots=True)
class Look:
    """What a waiting sequence saw of an instance when it was last looked at."""

    stamp: tuple[int, ...]
    """Changes when the instance's books do."""
    seat: Seat
    soon: int
    """Leading blocks being computed or fetched there for others,"""
    soon_at: float
    """the last of which are there by then."""
    fetch: int
    """Blocks it would pay to fetch."""


def find_seat(instance: Instance, sequence: Sequence, reservation: Reservation) -> Seat:
    """Look it up. Changes nothing."""
    request = sequence.request
    size = instance.info.block_tokens
    tokens = len(request.prompt) + len(sequence.out)
    shared: list[int] = []
    if request.sampling.prompt_logprobs is None:
        shared = instance.pool.find(prefix_hashes(instance, sequence))
    cached = len(shared) * size
    copy_from = -1
    if cached >= tokens:
        copy_from = shared.pop()
        cached = tokens - 1
    seat = Seat(shared, copy_from, cached)
    now_blocks = -(-tokens // size)
    output = reservation.output_tokens(request.sampling.max_tokens, len(sequence.out))
    later = -(-max(tokens, len(request.prompt) + output - 1) // size)
    seat.need = now_blocks - len(shared)
    seat.reserve = max(0, later - now_blocks)
    free = instance.pool.free - instance.pool.idle(shared if copy_from < 0 else [*shared, copy_from])
    if instance.running or instance.fetches:
        seat.fits = _has_room(instance, seat, free)
    else:
        # Alone it may use everything; what rests comes back in a moment.
        seat.fits = seat.need <= free and (seat.need + seat.reserve <= free or not instance.returning)
    return seat


def _has_room(instance: Instance, seat: Seat, free: int) -> bool:
    """Whether `free` blocks will do for it now and, as far as can be expected, for all until they end."""
    if seat.need + seat.reserve + instance.set_aside <= free:
        return True
    if seat.need > free:
        return False
    rows = [sequence.outlook for sequence in instance.running]
    rows += [(fetch.reserve, 0) for fetch in instance.fetchers]
    return seat.need + peak_growth([*rows, (seat.reserve, seat.need)]) <= free


def prefix_hashes(instance: Instance, sequence: Sequence) -> list[BlockHash]:
    """Hashes of the full blocks of prompt + output, computed once per attempt and kind of instance."""
    request = sequence.request
    size = instance.info.block_tokens
    kind = (instance.info.fingerprint, size)
    if request.hash_kind != kind:
        request.hash_kind = kind
        request.hashes = None
        for sibling in request.sequences:
            sibling.hashes = None
    if request.hashes is None:
        request.hashes = chain(_root(kind[0], size, request.salt), request.prompt, size)
    if not sequence.out:
        return request.hashes
    if sequence.hashes is None:
        sequence.hashes = chain(_root(kind[0], size, request.salt), sequence.ids(), size)
    return sequence.hashes
