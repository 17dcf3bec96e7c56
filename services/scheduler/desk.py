"""The clients' side: submits, cancels, acknowledgements, deadlines, and the ends of sequences.

Owns the clients, their requests and the wait queue. Knows instances only through the sequences on them.
"""

import heapq
from dataclasses import dataclass

from services.scheduler.admission import Reservation
from services.scheduler.clients import Client
from services.scheduler.counters import Counters
from services.scheduler.events import Effect, Hint, SendTokens
from services.scheduler.queues import WaitQueue
from services.scheduler.sequences import Phase, Request, Sequence
from services.scheduler.validate import impossible, malformed
from shared.subjects import subject_token
from shared.wire import Ack, Answer, BadFrame, Cancel, FinishReason, InstanceInfo, Submit


@dataclass(frozen=True)
class DeskRules:
    """Seconds and counts of the clients' side."""

    queue_bound: int = 1024
    """Waiting sequences at most, beyond those that find a slot; further submits are answered `queue_full`."""
    absent_s: float = 10.0
    """With no instance for this long nothing new is queued: it would only time out there."""
    aging_s: float = 30.0
    """Waiting time that makes up for one level of priority."""
    client_ttl_s: float = 10.0
    resend_s: float = 0.6
    """Without an acknowledgement for this long, frames are sent again. Clients acknowledge every 0.25 s."""
    resend_frames: int = 256
    """At most so many at a time."""
    remember_s: float = 30.0
    """How long an ended request's answer is repeated to late duplicates of its submit."""
    clients_remembered: int = 10_000
    """Records kept, of idle and lapsed clients too, for their numbering; then the longest silent go."""
    grace_s: float = 5.0
    """After a takeover the queue may be `grace_factor` times as long: what comes had been accepted before."""
    grace_factor: int = 4


@dataclass(frozen=True, slots=True)
class Supply:
    """What the fleet offers at this moment."""

    infos: list[InstanceInfo]
    vacant: int
    """Slots nobody holds: what goes into them with the next turn does not count as waiting."""
    absent_s: float
    """For how long there has been no instance; 0 while there is one."""


class Desk:
    """Clients, their requests, and the queue. One per process; `clear` begins anew."""

    def __init__(self, rules: DeskRules, reservation: Reservation, counters: Counters) -> None:
        self.rules = rules
        self.queue = WaitQueue(rules.aging_s)
        self.clients: dict[str, Client] = {}
        self.epoch = 0
        self.owner = ""
        self._opened = 0.0
        self._reservation = reservation
        self._counters = counters
        self._open: dict[int, Sequence] = {}
        """By order: every sequence that has not ended."""
        self._deadlines: list[tuple[float, int, bool]] = []
        """(when, order, whether it only ends waiting); entries of ended sequences are skipped."""
        self._arrivals: list[Sequence] = []
        """Began to wait lately."""
        self._order = 0
        self._ended = 0
        self._rate = 0.0
        """Sequences ended per second, smoothed."""
        self._rated_at = 0.0
        self._now = 0.0
        self._swept_at = 0.0

    def open(self, epoch: int, owner: str, now: float) -> None:
        """A leadership begins."""
        self.clear()
        self.epoch, self.owner = epoch, owner
        self._opened = self._rated_at = self._swept_at = now

    def clear(self) -> None:
        """A leadership ends: forget everything without a word; clients hear it from the next leader."""
        self.queue = WaitQueue(self.rules.aging_s)
        self.clients = {}
        self._open = {}
        self._deadlines = []
        self._arrivals = []

    # Submits

    def submit(self, submit: Submit, fleet: Supply, now: float) -> None:
        """Queue it, or refuse it; answer either way. A repetition gets its former answer."""
        client = self._client(submit.client, now)
        known = client.requests.get(submit.request_id)
        if known is not None:
            client.answer(Answer(submit.request_id, "accepted"))
            return
        earlier = client.answered.get(submit.request_id)
        if earlier is not None:
            client.answer(earlier[0])
            return
        refusal = self._refusal(client, submit, fleet, now)
        if refusal is not None:
            client.answer(refusal)
            client.answered[submit.request_id] = (refusal, now)
            return
        client.answer(Answer(submit.request_id, "accepted"), now)
        self._enqueue(client, submit, now)

    def _refusal(self, client: Client, submit: Submit, fleet: Supply, now: float) -> Answer | None:
        if reason := malformed(submit):
            return Answer(submit.request_id, "invalid", reason)
        if any(row.handle in client.sequences for row in submit.seqs):
            return Answer(submit.request_id, "invalid", "a handle is in use by another request")
        if reason := impossible(submit.prompt, submit.sampling.max_tokens, fleet.infos):
            return Answer(submit.request_id, "too_long", reason)
        bound = self.rules.queue_bound
        if len(submit.seqs) > bound:
            reason = f"{len(submit.seqs)} sequences in one request, above the queue's {bound}: ask for fewer"
            return Answer(submit.request_id, "invalid", reason)
        if self.epoch > 1 and now - self._opened < self.rules.grace_s:
            bound *= self.rules.grace_factor
        if any(row.accepted for row in submit.seqs):
            return None  # it was running under another leader: its client is owed the rest
        if fleet.absent_s > self.rules.absent_s:
            message = f"no worker has been there for {fleet.absent_s:.0f} s: start one with `hortator worker`"
            return Answer(submit.request_id, "no_instance", message, 5.0)
        if len(self.queue) + len(submit.seqs) > bound + fleet.vacant:
            self._counters.queue_full += 1
            wait_s = self.retry_after_s()
            message = f"{len(self.queue)} sequences wait already; try again in {wait_s:.0f} s"
            return Answer(submit.request_id, "queue_full", message, wait_s)
        return None

    def retry_after_s(self) -> float:
        """Time until half of the queue has gone at the present rate, within 1 to 60 seconds."""
        if self._rate <= 0.0:
            return 5.0
        return min(60.0, max(1.0, 0.5 * len(self.queue) / self._rate))

    def _enqueue(self, client: Client, submit: Submit, now: float) -> None:
        request = Request(
            client=client,
            request_id=submit.request_id,
            prompt=submit.prompt,
            sampling=submit.sampling,
            priority=submit.priority,
            arrived=now,
            deadline=now + submit.timeout_s,
            queue_deadline=now + min(submit.queue_timeout_s, submit.timeout_s),
            salt=submit.salt,
            pin=submit.pin,
        )
        client.requests[submit.request_id] = request
        for row in submit.seqs:
            self._order += 1
            sequence = Sequence(
                request=request,
                handle=row.handle,
                choice=row.choice,
                order=self._order,
                emit=client.rows.append,
                out=list(row.accepted),
                attempt=client.attempt,
                changed=now,
            )
            request.sequences.append(sequence)
            client.sequences[row.handle] = sequence
            self._open[self._order] = sequence
            heapq.heappush(self._deadlines, (request.deadline, self._order, False))
            heapq.heappush(self._deadlines, (request.queue_deadline, self._order, True))
            self.queue.push(sequence)
            self._arrivals.append(sequence)
        for sequence in list(request.sequences):
            # What the client had accepted may have been all of it: only the terminal row was lost.
            out = sequence.out
            if out and out[-1] in submit.sampling.stop_token_ids and len(out) > submit.sampling.min_tokens:
                self.end(sequence, "stop", "", now)
            elif len(out) >= submit.sampling.max_tokens:
                self.end(sequence, "length", "", now)

    def canary(self, submit: Submit, now: float) -> Sequence:
        """Queue a sequence of the core's own; its rows are read by nobody but the fleet."""
        client = Client(submit.client, now)
        self._enqueue(client, submit, now)
        request = client.requests[submit.request_id]
        request.canary = True
        return request.sequences[0]

    def hint(self, hint: Hint) -> None:
        """What the shared index says of sequences, if they still wait."""
        client = self.clients.get(hint.client)
        for handle in hint.handles if client else ():
            sequence = client.sequences.get(handle) if client else None
            if sequence is not None and sequence.phase is Phase.QUEUED:
                sequence.hold_until = 0.0
                if hint.blocks is not None:
                    sequence.hints = hint.blocks
                    sequence.looks.clear()

    def refuse_impossible(self, infos: list[InstanceInfo], now: float) -> None:
        """An instance became known: what waits and fits nowhere ends, instead of waiting for its deadline."""
        for sequence in self.queue:
            request = sequence.request
            reason = impossible(request.prompt, request.sampling.max_tokens, infos)
            if reason and not request.canary:
                self.end(sequence, "error", reason, now)

    def take_arrivals(self) -> list[Sequence]:
        """Those that began to wait since the last call and still do."""
        arrivals, self._arrivals = self._arrivals, []
        return [sequence for sequence in arrivals if sequence.phase is Phase.QUEUED]

    # Cancels and acknowledgements

    def cancel(self, cancel: Cancel, now: float) -> None:
        """End what the client names; nothing else of it reaches an instance."""
        client = self._client(cancel.client, now)
        request = client.requests.get(cancel.request_id)
        if request is None:
            if cancel.request_id not in client.answered:
                client.answer(Answer(cancel.request_id, "unknown_request"))
            return
        for sequence in list(request.sequences):
            if sequence.phase is not Phase.DONE and (not cancel.handles or sequence.handle in cancel.handles):
                self._counters.cancelled += 1
                self.end(sequence, "cancelled", "", now)

    def ack(self, ack: Ack, now: float) -> list[Effect]:
        """Forget frames that have arrived; send others again where the client asks for it."""
        client = self.clients.get(ack.client)
        if (ack.epoch, ack.owner) != (self.epoch, self.owner):
            # It has not heard of us yet (the beacon will tell it), or belongs to another model's leader.
            if client is not None:
                client.heard_at = now
            return []
        if client is None:
            client = self._client(ack.client, now)
            client.resume(ack.seq)
            client.answer(Answer("", "unknown_client"))
            return []
        client.heard_at = now
        if client.lapsed:
            client.resume(ack.seq)
            client.answer(Answer("", "unknown_client"))
            # Before what it has submitted since is answered.
            client.answers.insert(0, client.answers.pop())
            return []
        client.acknowledge(ack.seq, now)
        return self._again(client, now) if ack.resend else []

    def _again(self, client: Client, now: float) -> list[Effect]:
        frames = client.again(now, self.rules.resend_frames)
        self._counters.tokens_frames_resent += len(frames)
        return [SendTokens(client.id, frame) for frame in frames]

    # Ends

    def end(self, sequence: Sequence, reason: FinishReason, message: str, now: float) -> None:
        """The one terminal row of a sequence; gives back whatever it holds."""
        request = sequence.request
        client = request.client
        if sequence.phase is Phase.QUEUED:
            self.queue.remove(sequence)
        elif sequence.instance is not None:
            sequence.instance.leave(sequence)
        if request.warming is sequence:
            request.warming = None
        sequence.enter(Phase.DONE, now)
        self._open.pop(sequence.order, None)
        client.ends.append(sequence.end_row(reason, message))
        client.sequences.pop(sequence.handle, None)
        self._ended += 1
        if not request.open:
            client.requests.pop(request.request_id, None)
            client.answered[request.request_id] = (Answer(request.request_id, "accepted"), now)
            # Else prompts would stay in memory until the collector comes for the cycle, which is seldom.
            request.sequences.clear()

    def finish(self, sequence: Sequence, reason: FinishReason, message: str, now: float) -> None:
        """It ended by itself: also a lesson on how long outputs are."""
        if reason in ("stop", "length"):
            self._reservation.observe(sequence.request.sampling.max_tokens, len(sequence.out))
        self.end(sequence, reason, message, now)

    def preempted(self, sequence: Sequence) -> None:
        """Already off its instance; waits again at its old place, as a new attempt."""
        self.requeue(sequence, self._now)

    def requeue(self, sequence: Sequence, now: float) -> None:
        """Off its instance for whatever reason: waits at its old place, as a new attempt."""
        request = sequence.request
        if request.warming is sequence:
            request.warming = None
        sequence.enter(Phase.QUEUED, now)
        sequence.preemptions += 1
        sequence.attempt += 1
        sequence.hashes = None
        sequence.hints = {}
        sequence.looks.clear()
        request.client.top_attempt = max(request.client.top_attempt, sequence.attempt)
        self.queue.push(sequence)
        self._arrivals.append(sequence)

    # Time

    def tick(self, now: float) -> list[Effect]:
        """Deadlines, leases, repetitions."""
        effects: list[Effect] = []
        self._now = now
        self._expire(now)
        for client in self.clients.values():
            if client.owed and now - client.heard_at > self.rules.client_ttl_s:
                self._lapse(client, now)
            elif client.overdue(now, self.rules.resend_s):
                effects += self._again(client, now)
        if now - self._rated_at >= 1.0:
            self._rate += 0.3 * (self._ended / (now - self._rated_at) - self._rate)
            self._ended, self._rated_at = 0, now
        if now - self._swept_at >= 5.0:
            self._sweep(now)
        return effects

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, order, only_waiting = heapq.heappop(deadlines)
            sequence = self._open.get(order)
            if sequence is None:
                continue
            if not only_waiting:
                self._counters.expired += 1
                self.end(sequence, "timeout", "the request's time is over", now)
            elif sequence.phase is Phase.QUEUED and not sequence.preemptions and not sequence.out:
                self._counters.expired += 1
                wait_s = self.retry_after_s()
                message = f"no room within its time in the queue; try again in {wait_s:.0f} s"
                self.end(sequence, "timeout", message, now)

    def _lapse(self, client: Client, now: float) -> None:
        """Nobody listens any more: stop working for it."""
        self._counters.clients_lapsed += 1
        for sequence in list(client.sequences.values()):
            self.end(sequence, "cancelled", "", now)
        client.lapse()

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        if len(self._deadlines) > 1000 + 4 * len(self._open):
            # Most requests end long before their deadlines.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        if len(self.clients) > self.rules.clients_remembered:
            silent = sorted((c for c in self.clients.values() if not c.owed), key=lambda c: c.heard_at)
            for client in silent[: len(self.clients) - self.rules.clients_remembered]:
                del self.clients[client.id]
        for client in self.clients.values():
            old = [rid for rid, (_, at) in client.answered.items() if now - at > self.rules.remember_s]
            for request_id in old:
                del client.answered[request_id]

    def forgive(self, now: float) -> None:
        """We were deaf: no client's lease ran meanwhile."""
        for client in self.clients.values():
            client.heard_at = now

    def collect(self, now: float) -> list[Effect]:
        """This turn's token frames, one per client that has something to hear."""
        effects: list[Effect] = []
        self._now = now
        for client in self.clients.values():
            frame = client.collect(self.epoch, self.owner, now)
            if frame is not None:
                effects.append(SendTokens(client.id, frame))
        return effects

    @property
    def swamped(self) -> bool:
        """Whether every client with open sequences is behind: steps would bring nobody anything sooner.

        Waiting keeps batches full, where running on would finish sequences early and leave their slots
        empty until the clients have caught up.
        """
        open_ = [client for client in self.clients.values() if client.sequences]
        return bool(open_) and all(client.behind for client in open_)

    def last_frames(self) -> dict[str, int]:
        """For the beacon: the last frame of each client that has not acknowledged it."""
        return {client.id: client.seq for client in self.clients.values() if client.kept}

    def _client(self, name: str, now: float) -> Client:
        client = self.clients.get(name)
        if client is None:
            if subject_token(name) != name:
                # There is no subject to answer it on.
                raise BadFrame(
                    "client's", f"{name[:80]!r} is not a subject token: use [A-Za-z0-9_-], 1 to 64"
                )
            client = self.clients[name] = Client(name, now)
        client.heard_at = now
        return client

    def check(self) -> None:
        """Raises AssertionError where the books contradict each other."""
        waiting = list(self.queue)
        assert all(seq.phase is not Phase.DONE for seq in self._open.values()), "an ended one is kept"
        assert all(seq.phase is Phase.QUEUED for seq in waiting), "a sequence waits that is not queued"
        for client in self.clients.values():
            for sequence in client.sequences.values():
                assert sequence.phase is not Phase.DONE, "an ended sequence is still open"
                queued = sequence.phase is Phase.QUEUED
                assert queued == any(seq is sequence for seq in waiting), "queue and phase disagree"
                assert queued == (sequence.instance is None), "instance and phase disagree"
