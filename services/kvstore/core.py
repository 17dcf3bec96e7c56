"""What kvstore decides: which events count, what to write, whom to ask for a restate. Pure.

Event in, effects out; time is an argument. Events of an instance are gapless per (instance, born); whoever
is not followed (new, gap, store lost or back) is asked for a restate, which begins a fresh row in the index.
Only the process that holds the duty writes: until then, and while the store is away, nothing is followed.
"""

from dataclasses import dataclass, field

from shared.store.records import InstanceRecord
from shared.subjects import TIER
from shared.wire import InstanceInfo, KvEvents

HEARTBEAT_S = 1.0
TTL_S = 3 * HEARTBEAT_S
ASK_EVERY_S = 1.0
"""A restate takes a while and its request may be lost: an instance is asked again only after this."""
ASKS_PER_TICK = 4
"""When the store returns, a hundred instances restate one after the other, not at once."""
RECORD_EVERY_S = 0.4 * HEARTBEAT_S
PAUSE_S = 1.0
"""Ticks further apart mean that we stood still: silence then proves nothing."""


@dataclass(frozen=True)
class BusChanged:
    connected: bool


@dataclass(frozen=True)
class DutyChanged:
    """Whether we may and can write: the store is there and the duty is ours."""

    ours: bool
    reason: str = ""


@dataclass(frozen=True)
class RowLost:
    """The store does not know this row any more (flushed, or it refused a write)."""

    instance: str
    born: int


@dataclass(frozen=True)
class RowsFound:
    """Every instance of a model that has a row in the store, whoever began it."""

    model: str
    instances: frozenset[str]


@dataclass(frozen=True)
class Tick:
    pass


Event = KvEvents | BusChanged | DutyChanged | RowLost | RowsFound | Tick


@dataclass(frozen=True)
class BeginRow:
    model: str
    instance: str
    born: int


@dataclass(frozen=True)
class ChangeRow:
    """Stored and removed hashes are disjoint. With neither it only asks whether the row is still there."""

    model: str
    instance: str
    born: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Forget:
    """The instance is silent: its row and record go."""

    model: str
    instance: str


@dataclass(frozen=True)
class PutRecord:
    model: str
    instance: str
    record: InstanceRecord
    ttl_s: float


@dataclass(frozen=True)
class AskRestate:
    instance: str
    reason: str


Effect = BeginRow | ChangeRow | Forget | PutRecord | AskRestate


@dataclass
class Counts:
    events: int = 0
    repeated: int = 0
    gaps: int = 0
    asked: int = 0
    restates: int = 0
    expired: int = 0
    rows_lost: int = 0


@dataclass
class _Instance:
    born: int
    info: InstanceInfo
    seen_at: float
    highest: int = 0
    """Highest event seq heard in this life."""
    followed: bool = False
    """Every event up to `highest` is in the index."""
    reason: str = "new instance"
    """Why it is not followed."""
    asked_at: float = float("-inf")
    record_at: float = float("-inf")
    blocks: int = 0


@dataclass
class KvCore:
    """`handle(event, now)`; `now` in seconds of a monotonic clock."""

    counts: Counts = field(default_factory=Counts)
    _instances: dict[str, _Instance] = field(default_factory=dict)
    _strangers: dict[tuple[str, str], float] = field(default_factory=dict)
    # (model, instance) of a row in the store that nobody speaks for → since when we know
    _connected: bool = True
    _writing: bool = False
    _ticked_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case KvEvents():
                return self._heard(event, now)
            case Tick():
                return self._tick(now)
            case BusChanged(connected):
                self._connected = connected
                self._forgive(now)
            case DutyChanged(ours, reason):
                self._duty(ours, reason)
            case RowLost(instance, born):
                self._row_lost(instance, born)
            case RowsFound(model, instances):
                for name in instances - self._instances.keys():
                    self._strangers.setdefault((model, name), now)
        return []

    @property
    def models(self) -> set[str]:
        return {known.info.model for known in self._instances.values()}

    @property
    def blocks(self) -> dict[str, int]:
        """Indexed blocks of each instance that is followed."""
        return {name: known.blocks for name, known in self._instances.items() if known.followed}

    @property
    def heard_of(self) -> int:
        """Instances that serve, as against rows of second tiers."""
        return sum(not name.startswith(TIER) for name in self._instances)

    def _heard(self, event: KvEvents, now: float) -> list[Effect]:
        self.counts.events += 1
        known = self._instances.get(event.instance)
        if known is not None and event.born < known.born:
            # A frame of a former life that was long under way.
            self.counts.repeated += 1
            return []
        effects: list[Effect] = []
        if known is None or event.born > known.born or event.info.model != known.info.model:
            if known is not None:
                effects += self._forget(event.instance, known)
            known = self._instances[event.instance] = _Instance(event.born, event.info, now)
        known.seen_at = now
        if event.seq <= known.highest:
            self.counts.repeated += 1
            return effects
        in_order = event.seq == known.highest + 1
        known.highest = event.seq
        state_changed = event.info.state != known.info.state
        known.info = event.info
        if self._writing:
            effects += self._apply(event, known, in_order)
            if state_changed or now - known.record_at >= RECORD_EVERY_S:
                effects += self._record(event.instance, known, now)
        return effects

    def _apply(self, event: KvEvents, known: _Instance, in_order: bool) -> list[Effect]:
        """The event's part in the index, if it can be believed to be complete."""
        row = (event.info.model, event.instance, event.born)
        effects: list[Effect] = []
        # The first event of a life needs no restate: there was nothing before it.
        if event.restate == "begin" or event.seq == 1:
            self.counts.restates += event.restate == "begin"
            known.followed, known.reason, known.blocks = True, "", 0
            effects.append(BeginRow(*row))
        elif known.followed and not in_order:
            self.counts.gaps += 1
            known.followed, known.reason = False, "gap"
        if known.followed and (event.stored or event.removed):
            known.blocks += len(event.stored) - len(event.removed)
            effects.append(ChangeRow(*row, tuple(event.stored), tuple(event.removed)))
        return effects

    def _record(self, instance: str, known: _Instance, now: float) -> list[Effect]:
        known.record_at = now
        model = known.info.model
        effects: list[Effect] = []
        if not instance.startswith(TIER):  # a second tier has blocks, but serves nobody
            record = InstanceRecord(info=known.info, blocks=known.blocks)
            effects.append(PutRecord(model, instance, record, TTL_S))
        if known.followed:
            # A store that was flushed between two events would otherwise go unnoticed.
            effects.append(ChangeRow(model, instance, known.born))
        return effects

    def _tick(self, now: float) -> list[Effect]:
        paused = self._ticked_at is not None and now - self._ticked_at > PAUSE_S
        self._ticked_at = now
        if paused or not self._connected:
            self._forgive(now)
            return []
        effects: list[Effect] = []
        for name, known in list(self._instances.items()):
            if now - known.seen_at > TTL_S:
                self.counts.expired += 1
                del self._instances[name]
                effects += self._forget(name, known)
        return effects + self._forget_strangers(now) + self._ask(now)

    def _forget_strangers(self, now: float) -> list[Effect]:
        """Rows of instances that died while nobody wrote, or under a former kvstore."""
        effects: list[Effect] = []
        for (model, name), since in list(self._strangers.items()):
            if name in self._instances:
                del self._strangers[model, name]
            elif now - since > TTL_S:
                del self._strangers[model, name]
                effects.append(Forget(model, name))
        return effects

    def _ask(self, now: float) -> list[Effect]:
        if not self._writing:
            return []
        due = [
            (known.asked_at, name)
            for name, known in self._instances.items()
            if not known.followed and now - known.asked_at >= ASK_EVERY_S
        ]
        effects: list[Effect] = []
        for _, name in sorted(due)[:ASKS_PER_TICK]:
            self._instances[name].asked_at = now
            self.counts.asked += 1
            effects.append(AskRestate(name, self._instances[name].reason))
        return effects

    def _forget(self, instance: str, known: _Instance) -> list[Effect]:
        return [Forget(known.info.model, instance)] if self._writing else []

    def _forgive(self, now: float) -> None:
        """We were deaf: nobody's silence counts until now."""
        for known in self._instances.values():
            known.seen_at = now
        for stranger in self._strangers:
            self._strangers[stranger] = now

    def _duty(self, ours: bool, reason: str) -> None:
        if ours == self._writing:
            return
        self._writing = ours
        self._strangers.clear()
        for known in self._instances.values():
            known.followed, known.reason, known.blocks = False, reason or "store is back", 0
            known.asked_at = known.record_at = float("-inf")

    def _row_lost(self, instance: str, born: int) -> None:
        known = self._instances.get(instance)
        if known is not None and known.born == born and known.followed:
            self.counts.rows_lost += 1
            known.followed, known.reason, known.blocks = False, "store lost the row", 0
