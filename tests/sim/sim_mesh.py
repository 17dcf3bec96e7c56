"""A whole simulated mesh: schedulers, workers, clients, broker and Redis, with what happened written down."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim_nodes import ClientNode, SchedulerNode, WorkerNode, reference
from sim_tier import Ill, Tier
from sim_world import Node, Redis, World

from services.scheduler.admission import ExpectedOutput, Reservation
from services.scheduler.leadership import owner_name
from shared.client.effects import Open
from shared.wire import Ack, Cancel, EndRow, Sampling, Submit


class Violation(AssertionError):
    """A property of design §11 does not hold; the message names it."""


@dataclass
class Line:
    """What one client was told of one sequence."""

    prompt: list[int]
    sampling: Sampling
    choice: int
    deadline: float
    tokens: list[int] = field(default_factory=list)
    attempt: tuple[int, str, int] = (0, "", 0)
    end: EndRow | None = None
    refused: str = ""
    cancelled: bool = False
    hasty: bool = False
    """Its deadline is so near that it may well pass."""
    ended_at: float = 0.0


class History:
    """P1–P8 as far as clients can see them, checked at each event and at the end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lines: dict[tuple[str, str, int], Line] = {}
        self.clients: dict[str, ClientNode] = {}

    def opened(self, client: ClientNode, spec: Open) -> None:
        self.clients[client.name] = client
        for choice in range(len(spec.sinks)):
            self.lines[client.name, spec.request_id, choice] = Line(
                spec.prompt,
                spec.sampling,
                choice,
                self.world.now + spec.timeout_s,
                hasty=spec.timeout_s < 10.0,
            )

    def cancelled(self, client: ClientNode, request_id: str, choices: tuple[int, ...]) -> None:
        for (name, request, choice), line in self.lines.items():
            if (name, request) == (client.name, request_id) and (not choices or choice in choices):
                line.cancelled = True

    def progress(self, client: ClientNode, seq: Any, ids: list[int]) -> None:
        line = self.lines[client.name, seq.request.id, seq.choice]
        if line.end is not None:
            raise Violation(f"P3: tokens after the end of {seq.request.id}")
        attempt = (client.core.epoch, client.core.owner, seq.attempt)
        if attempt[0] < line.attempt[0] or (attempt[:2] == line.attempt[:2] and attempt < line.attempt):
            raise Violation(f"P4: {seq.request.id} got tokens of {attempt} after {line.attempt}")
        line.attempt = attempt
        line.tokens += ids
        if line.tokens != seq.accepted[: len(line.tokens)]:
            raise Violation(f"P1: {seq.request.id} has a hole or a repetition")

    def ended(self, client: ClientNode, seq: Any, end: EndRow) -> None:
        line = self.lines[client.name, seq.request.id, seq.choice]
        if line.end is not None:
            raise Violation(f"P3: {seq.request.id} ended twice")
        line.end = end
        line.ended_at = self.world.now
        if end.generated != len(line.tokens) and end.reason in ("stop", "length"):
            raise Violation(f"P3: {seq.request.id}: usage {end.generated}, delivered {len(line.tokens)}")

    def refused(self, client: ClientNode, request: Any, answer: Any) -> None:
        for (name, request_id, _), line in self.lines.items():
            if (name, request_id) == (client.name, request.id):
                line.refused = answer.code

    def check(self, allow_trouble: bool) -> None:
        """At the end. `allow_trouble`: faults were long enough to let deadlines and leases pass."""
        for (name, request, choice), line in self.lines.items():
            what = f"{name}/{request}/{choice}"
            wanted, reason = reference(line.prompt, line.sampling, choice)
            if line.tokens != wanted[: len(line.tokens)]:
                at = next(i for i, (a, b) in enumerate(zip(line.tokens, wanted)) if a != b)
                raise Violation(f"P2: {what} differs from the reference at token {at}")
            if not self.clients[name].alive or line.refused:
                # A client gives up by itself when no scheduler was to be had for 15 s.
                if line.refused not in ("", "no_instance") and not allow_trouble:
                    raise Violation(f"P5: {what} was refused: {line.refused}")
                continue
            if line.end is not None and line.ended_at > line.deadline + 2.2:
                raise Violation(f"P5: {what} ended {line.ended_at - line.deadline:.1f} s after its deadline")
            if line.end is None:
                raise Violation(f"P5: {what} never ended ({len(line.tokens)} of {len(wanted)} tokens)")
            if line.end.reason in ("stop", "length"):
                if line.tokens != wanted or line.end.reason != reason:
                    got = f"{line.end.reason} after {len(line.tokens)} tokens"
                    raise Violation(f"P8: {what} ended with {got}, not {reason} after {len(wanted)}")
            elif line.end.reason == "cancelled" and not line.cancelled:
                raise Violation(f"P3: {what} was cancelled by nobody")
            elif line.end.reason == "timeout" and line.hasty:
                continue
            elif line.end.reason in ("timeout", "error") and not allow_trouble:
                raise Violation(f"P5: {what} ended with {line.end.reason}: {line.end.message}")


class Optimist:
    """A reservation that sets nothing aside, so that blocks run out and sequences are preempted."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return min(written + 1, max_tokens)

    def expected_tokens(self, max_tokens: int, written: int) -> int:
        return self.output_tokens(max_tokens, written)

    def observe(self, max_tokens: int, generated: int) -> None:
        return

    def preempted(self) -> None:
        return


class Mesh:
    """Nodes by name, and how frames get from one to another."""

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 1,
        schedulers: int = 1,
        clients: int = 1,
        blocks: int = 64,
        slots: int = 8,
        step_s: float = 0.015,
        reservation: Callable[[], Reservation] = ExpectedOutput,
        tier: Ill | None = None,
    ) -> None:
        """`tier`: there is a second tier, with these troubles."""
        self.world = World(seed)
        self.tier = None if tier is None else Tier(random.Random(seed), tier)
        self.patience_s = 20 * step_s
        self.redis = Redis()
        self.model = "sim"
        self.blocks, self.slots, self.step_s = blocks, slots, step_s
        self.reservation: Callable[[], Reservation] = reservation
        self.history = History(self.world)
        self.workers: dict[str, WorkerNode] = {}
        self.schedulers: dict[str, SchedulerNode] = {}
        self.clients: dict[str, ClientNode] = {}
        self.dead: list[Node] = []
        self._lives = 0
        for index in range(workers):
            self.start_worker(f"w{index}")
        for _ in range(schedulers):
            self.start_scheduler()
        for index in range(clients):
            self.clients[f"c{index}"] = ClientNode(self, f"c{index}")

    def start_worker(self, name: str) -> None:
        self.workers[name] = WorkerNode(self, name, self.blocks, self.slots)

    def start_scheduler(self) -> SchedulerNode:
        self._lives += 1
        # Owners in no particular order, as random suffixes are.
        name = owner_name(self.model, f"s{self.world.rng.randrange(1000):03}", str(self._lives))
        node = self.schedulers[name] = SchedulerNode(self, name)
        return node

    def kill(self, node: Node) -> None:
        node.alive = False
        self.dead.append(node)
        self.schedulers.pop(node.name, None)

    @property
    def leader(self) -> SchedulerNode | None:
        """The one that leads with the highest claim."""
        leading = [s for s in self.schedulers.values() if s.alive and s.core.leads]
        return max(leading, key=lambda s: s.core.leadership.epoch, default=None)

    # Subjects

    def to_schedulers(self, source: Node, frame: Any) -> None:
        clients_frame = isinstance(frame, Submit | Cancel | Ack)
        for scheduler in list(self.schedulers.values()):
            # Only the leader subscribes to clients.
            if not clients_frame or scheduler.core.leads:
                self.world.send(source, scheduler, frame, scheduler.feed)

    def to_worker(self, source: Node, name: str, frame: Any, method: str) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            self.world.send(source, worker, frame, getattr(worker, method))

    def to_client(self, source: Node, name: str, frame: Any) -> None:
        client = self.clients.get(name)
        if client is not None:
            self.world.send(source, client, frame, client.feed)

    def to_all(self, source: Node, beacon: Any) -> None:
        for scheduler in list(self.schedulers.values()):
            if scheduler is not source:
                self.world.send(source, scheduler, beacon, scheduler.feed)
        for worker in self.workers.values():
            self.world.send(source, worker, beacon, worker.on_beacon)
        for client in self.clients.values():
            self.world.send(source, client, beacon, client.feed)

    # Running

    def check_books(self) -> None:
        for scheduler in self.schedulers.values():
            if scheduler.alive:
                scheduler.core.check()
        for worker in self.workers.values():
            if worker.faults:
                raise Violation(
                    f"P7: {worker.name} was sent a frame that contradicts its batch: {worker.faults[0]}"
                )

    def run(self, seconds: float, until: Any = None, *, careful: bool = False) -> bool:
        return self.world.run(self.world.now + seconds, until, self.check_books if careful else None)

    def quiet(self) -> bool:
        """Every request of a live client has ended or was refused."""
        return all(not client.core.requests for client in self.clients.values() if client.alive)

    def check_baseline(self) -> None:
        """P6: nothing is held by anybody once nobody wants anything."""
        self.check_books()
        leading = [s.name for s in self.schedulers.values() if s.alive and s.core.leads]
        leader = self.leader
        if leader is None:
            raise Violation("P5: nobody leads")
        if len(leading) > 1:
            raise Violation(f"P4: {leading} lead at the same time")
        core = leader.core
        if len(core.desk.queue):
            raise Violation(f"P6: {len(core.desk.queue)} sequences still wait")
        for client in core.desk.clients.values():
            if client.requests or client.sequences:
                raise Violation(f"P6: requests of {client.id} are still open")
        for name, worker in self.workers.items():
            if not worker.alive:
                continue
            instance = core.fleet.instances.get(name)
            if instance is None or not instance.planned:
                raise Violation(f"P6: {name} is alive but {instance and instance.state}")
            if instance.running or instance.resting or instance.leaving or instance.in_flight:
                raise Violation(f"P6: {name} still holds {instance.running}, {instance.resting}")
            if instance.fetches or worker.compute.batch.fetching:
                raise Violation(f"P6: fetches of {name} never ended: {list(instance.fetches)}")
            if instance.pool.free != instance.pool.size or instance.reserved or instance.backlog:
                raise Violation(f"P6: {name} has {instance.pool.free} of {instance.pool.size} blocks free")
            if worker.compute.batch.live:
                raise Violation(f"P6: {name} has {worker.compute.batch.live} slots taken")
