"""The account of what can be shared of an instance, or of a second tier: gapless events and restates to the
kvstore that writes the index (protocol §6)."""

from collections.abc import Sequence

from shared.wire import InstanceInfo, KvEvents

PAGE = 10_000
"""Hashes per frame at most: 10,000 × 41 bytes stay well below the broker's 1 MiB."""

HEARTBEAT_S = 0.9
"""An event at least this often (with `GATHER_S` below a second): it exposes a lost last one."""

GATHER_S = 0.02
"""Changes are gathered this long: at 1,000 steps a second a frame each would cost more than it tells."""


class KvEventLog:
    """Pure. `seq` is gapless from 1 within the life of the process."""

    def __init__(self, instance: str, born: int) -> None:
        self._instance = instance
        self._born = born
        self._seq = 0
        self._pending: dict[bytes, bool] = {}
        # net change since the last event: hash → stored (True) or removed

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Net changes of one step, after those noted before."""
        for hashes, came in ((stored, True), (removed, False)):
            for block_hash in hashes:
                if self._pending.get(block_hash, came) is came:
                    self._pending[block_hash] = came
                else:
                    del self._pending[block_hash]

    def take(self, info: InstanceInfo) -> list[KvEvents]:
        """What happened since the last call: one event, several if it exceeds what a frame may hold."""
        stored = [block_hash for block_hash, came in self._pending.items() if came]
        removed = [block_hash for block_hash, came in self._pending.items() if not came]
        self._pending.clear()
        events = [self._event(info, stored=stored[:PAGE], removed=removed[:PAGE])]
        for start in range(PAGE, max(len(stored), len(removed)), PAGE):
            part = slice(start, start + PAGE)
            events.append(self._event(info, stored=stored[part], removed=removed[part]))
        return events

    def restate(self, hashes: Sequence[bytes], info: InstanceInfo) -> list[KvEvents]:
        """Everything there is; what was noted before the list was made is in it."""
        self._pending.clear()
        events = [self._event(info, stored=list(hashes[:PAGE]), restate="begin")]
        for start in range(PAGE, len(hashes), PAGE):
            events.append(self._event(info, stored=list(hashes[start : start + PAGE]), restate="part"))
        return events

    def _event(self, info: InstanceInfo, **content: object) -> KvEvents:
        self._seq += 1
        return KvEvents(instance=self._instance, born=self._born, seq=self._seq, info=info, **content)  # type: ignore[arg-type]
