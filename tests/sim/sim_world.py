"""Virtual time, a broker that loses, doubles, delays and reorders, and a Redis that forgets."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Deliver = Callable[[Any], None]


@dataclass
class Weather:
    """What the broker does to frames. Probabilities per frame, delays in seconds."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    """Share of frames that are held up, long enough for later ones to overtake."""
    late_s: float = 0.4
    base_s: float = 0.0005


@dataclass
class Node:
    """Something that can die, stop and wake up, or be cut off from the broker."""

    name: str
    alive: bool = True
    stopped: bool = False
    cut: bool = False
    backlog: list[tuple[Deliver, Any]] = field(default_factory=list)
    """What arrived while it was stopped: sockets hold it until it wakes."""


class World:
    """Runs callbacks in order of virtual time. Everything random comes from one generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.weather = Weather()
        self.events = 0
        self.filter: Callable[[str, str, Any], bool] | None = None
        """(from, to, frame) → whether it passes; tests lose chosen frames with it."""
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._last: dict[tuple[str, str], float] = {}

    def at(self, when: float, do: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._count, do))

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        self.at(self.now + seconds, do)

    def every(self, node: Node, seconds: float, do: Callable[[], object]) -> None:
        """While `node` lives; a stopped node's timer fires once when it wakes."""

        def fire() -> None:
            if not node.alive:
                return
            if node.stopped:
                node.backlog.append((lambda _: fire(), None))
                return
            do()
            self.after(seconds, fire)

        self.after(seconds * self.rng.random(), fire)

    def send(self, source: Node, target: Node, frame: Any, deliver: Deliver) -> None:
        """From a live node over the broker; at most once each copy, in no certain order."""
        weather, rng = self.weather, self.rng
        if source.cut or (self.filter is not None and not self.filter(source.name, target.name, frame)):
            return
        for _ in range(2 if weather.double and rng.random() < weather.double else 1):
            if weather.drop and rng.random() < weather.drop:
                continue
            when = self.now + weather.base_s * (1 + rng.random())
            if weather.late and rng.random() < weather.late:
                when += rng.random() * weather.late_s
            else:
                # One connection keeps its order; what is held up was sent over another.
                pair = source.name, target.name
                when = self._last[pair] = max(when, self._last.get(pair, 0.0))
            self.at(when, lambda: self._arrive(target, frame, deliver))

    def _arrive(self, target: Node, frame: Any, deliver: Deliver) -> None:
        if not target.alive or target.cut:
            return
        if target.stopped:
            target.backlog.append((deliver, frame))
        else:
            deliver(frame)

    def stop(self, node: Node) -> None:
        node.stopped = True

    def wake(self, node: Node) -> None:
        """SIGCONT: what waited in its sockets and timers comes at once, timers first or in between."""
        if not node.stopped:
            return
        node.stopped = False
        backlog, node.backlog = node.backlog, []
        if self.rng.random() < 0.5:
            backlog.sort(key=lambda entry: entry[1] is not None)
        for deliver, frame in backlog:
            if node.alive:
                deliver(frame)

    def run(
        self,
        until: float,
        done: Callable[[], bool] | None = None,
        after_each: Callable[[], None] | None = None,
    ) -> bool:
        """Until virtual time `until`, or `done()`. Returns whether `done()` held."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, do = heapq.heappop(heap)
            if when > self.now:
                self.now = when
            do()
            self.events += 1
            if after_each is not None:
                after_each()
            if done is not None and done():
                return True
        self.now = max(self.now, until)
        return done() if done is not None else True


@dataclass
class Redis:
    """The lease as `shared/store` keeps it; may be flushed or away at any moment."""

    up: bool = True
    highest: int = 0
    highest_owner: str = ""
    holder: tuple[int, str] | None = None
    until: float = 0.0

    def flush(self) -> None:
        self.highest, self.highest_owner, self.holder, self.until = 0, "", None, 0.0

    def write(self, epoch: int, owner: str, ttl_s: float, now: float) -> bool:
        if epoch < self.highest or (
            epoch == self.highest and self.highest_owner and owner > self.highest_owner
        ):
            return False
        self.highest, self.highest_owner = epoch, owner
        self.holder, self.until = (epoch, owner), now + ttl_s
        return True

    def read(self, now: float) -> tuple[int, tuple[int, str] | None]:
        return self.highest, self.holder if now < self.until else None
