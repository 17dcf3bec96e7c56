"""The worker's batch, slow and obvious: lists and dicts, one slot at a time. Oracle of `slots.Batch`."""

from dataclasses import dataclass, field

from shared.blocks import chain, root_hash
from shared.wire import Sampling, Step


@dataclass
class SlowSlot:
    ids: list[int]
    prompt_len: int
    computed: int
    blocks: list[int]
    sampling: Sampling
    salt: str
    confirmed: int
    stopped: bool = False

    @property
    def decoding(self) -> bool:
        return not self.stopped and self.computed == len(self.ids) - 1


@dataclass
class SlowResult:
    tokens: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    stored: list[tuple[int, bytes]] = field(default_factory=list)


class SlowBatch:
    def __init__(self, fingerprint: str, block_tokens: int, max_len: int) -> None:
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens
        self.max_len = max_len
        self.slots: dict[int, SlowSlot] = {}
        self.hash_of: dict[int, bytes] = {}

    def apply(self, frame: Step) -> list[tuple[int, int, int, bool]]:
        """Rows (slot, start, count, samples) in slot order."""
        for slot in frame.release:
            del self.slots[slot]
        for admit in frame.admit:
            assert admit.slot not in self.slots
            cached = admit.computed // self.block_tokens
            for block in admit.blocks[cached:]:
                self.hash_of.pop(block, None)
            self.slots[admit.slot] = SlowSlot(
                list(admit.ids),
                admit.prompt_len,
                admit.computed,
                list(admit.blocks),
                admit.sampling,
                admit.salt,
                cached,
            )
        for extend in frame.blocks:
            for block in extend.blocks:
                self.hash_of.pop(block, None)
            self.slots[extend.slot].blocks += extend.blocks
        for op in frame.kv_ops:
            self.hash_of.pop(op.dst, None)
        wanted = {work.slot: work.count for work in frame.work}
        rows = []
        for slot, seq in sorted(self.slots.items()):
            count = 0 if seq.stopped else wanted.get(slot, 1 if seq.decoding else 0)
            if count:
                rows.append((slot, seq.computed, count, seq.computed + count == len(seq.ids)))
        return rows

    def commit(self, rows: list[tuple[int, int, int, bool]], drawn: dict[int, int]) -> SlowResult:
        """`drawn`: the token of every slot that samples."""
        result = SlowResult()
        for slot, start, count, samples in rows:
            seq = self.slots[slot]
            seq.computed = start + count
            root = root_hash(self.fingerprint, self.block_tokens, seq.salt)
            hashes = chain(root, seq.ids[: seq.computed], self.block_tokens)
            for index in range(seq.confirmed, len(hashes)):
                self.hash_of[seq.blocks[index]] = hashes[index]
                result.stored.append((seq.blocks[index], hashes[index]))
            seq.confirmed = len(hashes)
            if not samples:
                continue
            token = result.tokens[slot] = drawn[slot]
            generated_before = len(seq.ids) - seq.prompt_len
            seq.ids.append(token)
            if token in seq.sampling.stop_token_ids and generated_before >= seq.sampling.min_tokens:
                result.stopped[slot] = "stop"
            elif generated_before + 1 >= seq.sampling.max_tokens or len(seq.ids) >= self.max_len:
                result.stopped[slot] = "length"
            seq.stopped = slot in result.stopped
        return result
