"""A client's side of docs/protocol.md §4: submits, tokens in order, acknowledgements, change of leader.

Pure: events and the time go in, effects come out. It owns the accepted-token log of every open sequence,
which is all that is needed to go on after the scheduler's death.
"""

import heapq
from collections.abc import Iterable

from shared.client.effects import (
    Accepted,
    Close,
    Counts,
    Effect,
    Ended,
    Event,
    Open,
    Progress,
    Refused,
    Tick,
    Unsendable,
)
from shared.client.records import ANSWER_S, OpenRequest, OpenSeq, complete
from shared.ids import MAX_EPOCH
from shared.wire import Ack, Answer, Beacon, Cancel, EndRow, FinishReason, Submit, SubmitSeq, Tokens

REPEAT_S = 0.3
"""Submits until answered, cancels until ended."""
ACK_FRAMES = 4
"""Frames acknowledged together at the latest: the scheduler waits for a client that is far behind."""
ACK_S = 0.25
"""While frames come."""
LEASE_S = 1.0
"""Otherwise, as long as anything is open."""
RESEND_S = 0.1
"""Least time between two requests to send frames again."""
TAIL_S = 0.05
"""A beacon may overtake the frames it speaks of; they are missed only after this."""
DEADLINE_GRACE_S = 2.0
"""Ends at the deadline are the scheduler's to tell; after this the client ends a sequence itself."""
QUIET_S = 1.0
"""An `unknown_client` out of order is believed only after so long without a frame in order."""

_TRY_LATER = frozenset(("queue_full", "no_instance", "draining"))

Leadership = tuple[int, str]


class ClientCore:
    """State of one client. `client` is its name for this life; a new life takes a new name."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.counts = Counts()
        self.requests: dict[str, OpenRequest] = {}
        self._seqs: dict[int, OpenSeq] = {}
        self._unanswered: dict[str, OpenRequest] = {}
        self._cancelling: dict[str, OpenRequest] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._handles = 0
        self._leader: Leadership = (0, "")
        self._next_seq = 1
        self._acked = 0
        self._ack_at = 0.0
        self._ack_now = False
        self._resend_at = 0.0
        self._tail = (0, 0.0)
        """(last frame a beacon told of, when it is due)."""
        self._heard_at = 0.0
        self._rejoin_at = 0.0

    @property
    def epoch(self) -> int:
        return self._leader[0]

    @property
    def owner(self) -> str:
        return self._leader[1]

    @property
    def is_busy(self) -> bool:
        """Whether ticks are needed: something is open, or frames wait for their acknowledgement."""
        return bool(self.requests) or self._ack_now or self._acked != self._next_seq - 1

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Never raises for anything a peer sends. Raises ValueError for a request id that is open already."""
        out: list[Effect] = []
        if type(event) is Tokens:
            self._tokens(event, now, out)
        elif type(event) is Tick:
            self._tick(now, out)
        elif type(event) is Open:
            self._open(event, now, out)
        elif type(event) is Close:
            self._close(event, now, out)
        elif type(event) is Beacon:
            self._beacon(event, now, out)
        elif type(event) is Unsendable:
            self._unsendable(event, out)
        return out

    # What the caller wants

    def _open(self, spec: Open, now: float, out: list[Effect]) -> None:
        if spec.request_id in self.requests:
            raise ValueError(f"request {spec.request_id!r} is open already")
        if not self.requests:
            self._wake(now, out)
        request = OpenRequest(spec, self._handles + 1, now)
        self._handles += len(request.seqs)
        self.requests[request.id] = request
        self._seqs.update(request.seqs)
        self._unanswered[request.id] = request
        heapq.heappush(self._deadlines, (request.deadline + DEADLINE_GRACE_S, self._handles, request.id))
        self._submit(request, now, out)

    def _wake(self, now: float, out: list[Effect]) -> None:
        """The first request after a time without any: the lease may have lapsed, so renew it beforehand.

        A leader that never sent us a frame has no lease of ours; it learns of us by the submit.
        """
        if self._next_seq == 1:
            self._ack_at = now
        elif now - self._ack_at >= LEASE_S:
            self._ack(now, out)

    def _close(self, event: Close, now: float, out: list[Effect]) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            return
        for seq in request.seqs.values():
            if not event.choices or seq.choice in event.choices:
                seq.cancelling = True
        self._cancelling[request.id] = request
        if all(seq.cancelling for seq in request.seqs.values()):
            self._unanswered.pop(request.id, None)
        self._cancel(request, now, out)

    def _unsendable(self, event: Unsendable, out: list[Effect]) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self._refused(request, Answer(request.id, "too_long", event.reason), out)

    def _submit(self, request: OpenRequest, now: float, out: list[Effect]) -> None:
        request.send_at = now + REPEAT_S
        spec = request.spec
        seqs = [
            SubmitSeq(seq.handle, seq.choice, list(seq.accepted))
            for seq in request.seqs.values()
            if not seq.cancelling
        ]
        out.append(
            Submit(
                client=self.client,
                request_id=request.id,
                prompt=spec.prompt,
                seqs=seqs,
                sampling=spec.sampling,
                priority=spec.priority,
                timeout_s=max(0.001, request.deadline - now),
                # Once taken, time in the queue of another leader is not the client's waiting time.
                queue_timeout_s=spec.queue_timeout_s
                if request.taken
                else max(0.001, request.queue_until - now),
                salt=spec.salt,
                pin=spec.pin,
            )
        )

    def _cancel(self, request: OpenRequest, now: float, out: list[Effect]) -> None:
        request.cancel_at = now + REPEAT_S
        handles = [seq.handle for seq in request.seqs.values() if seq.cancelling]
        out.append(Cancel(client=self.client, request_id=request.id, handles=handles))

    # What the scheduler says

    def _tokens(self, frame: Tokens, now: float, out: list[Effect]) -> None:
        leader = (frame.epoch, frame.owner)
        if leader != self._leader and not self._follow(leader, now, out):
            self.counts.stale_frames += 1
            return
        if frame.seq != self._next_seq:
            self._out_of_order(frame, now, out)
            return
        self._next_seq += 1
        self._heard_at = now
        if frame.answers:
            self._answers(frame.answers, now, out)
        if frame.logprobs or frame.prompt_logprobs:
            self._logprobs(frame)
        if frame.rows:
            self._rows(frame, out)
        for end in frame.ends:
            self._ended(end, out)
        if self._next_seq - self._acked > ACK_FRAMES:
            self._ack(now, out)

    def _rows(self, frame: Tokens, out: list[Effect]) -> None:
        # The path of every token: look-ups are taken out of the loop.
        find, unanswered = self._seqs.get, self._unanswered
        fresh: list[tuple[OpenSeq, list[int]]] = []
        for row in frame.rows:
            seq = find(row.handle)
            if seq is None:
                continue
            if row.attempt != seq.attempt:
                if row.attempt < seq.attempt:
                    self.counts.stale_rows += 1
                    continue
                seq.attempt = row.attempt
            accepted = seq.accepted
            ids = row.ids
            if row.index != len(accepted):
                repeated = len(accepted) - row.index
                if repeated < 0:
                    self.counts.impossible_rows += 1
                    continue
                self.counts.repeated_tokens += min(repeated, len(ids))
                ids = ids[repeated:]
                if not ids:
                    continue
            if unanswered and not seq.request.answered:
                self._answered(seq.request, out)
            accepted += ids
            fresh.append((seq, ids))
        if fresh:
            out.append(Progress(fresh))

    def _logprobs(self, frame: Tokens) -> None:
        for row in frame.logprobs:
            seq = self._seqs.get(row.handle)
            if seq is not None and row.index <= len(seq.logprobs):
                known = len(seq.logprobs) - row.index
                seq.logprobs += list(zip(row.chosen[known:], row.top[known:], strict=False))
        for prompt in frame.prompt_logprobs:
            seq = self._seqs.get(prompt.handle)
            if seq is not None:
                for offset, entry in enumerate(zip(prompt.chosen, prompt.top, strict=False)):
                    seq.request.prompt_logprobs.setdefault(prompt.start + offset, entry)

    def _ended(self, end: EndRow, out: list[Effect]) -> None:
        seq = self._seqs.get(end.handle)
        if seq is None:
            return
        if end.attempt < seq.attempt:
            self.counts.stale_rows += 1
            return
        if end.generated != len(seq.accepted) and not seq.cancelling and end.reason in ("stop", "length"):
            message = f"the scheduler counts {end.generated} tokens, {len(seq.accepted)} were delivered"
            end = EndRow(end.handle, end.attempt, "error", len(seq.accepted), message=message)
        if not seq.request.answered:
            self._answered(seq.request, out)
        self._finish(seq, end, out)

    def _finish(self, seq: OpenSeq, end: EndRow, out: list[Effect]) -> None:
        request = seq.request
        del self._seqs[seq.handle]
        del request.seqs[seq.handle]
        if not any(other.cancelling for other in request.seqs.values()):
            self._cancelling.pop(request.id, None)
        if not request.seqs:
            self._forget(request)
        self.counts.by_end[end.reason] = self.counts.by_end.get(end.reason, 0) + 1
        out.append(Ended(seq, end))

    def _end_here(self, seq: OpenSeq, reason: FinishReason, message: str, out: list[Effect]) -> None:
        self._finish(seq, EndRow(seq.handle, seq.attempt, reason, len(seq.accepted), message=message), out)

    def _forget(self, request: OpenRequest) -> None:
        self.requests.pop(request.id, None)
        self._unanswered.pop(request.id, None)
        self._cancelling.pop(request.id, None)
        for handle in request.seqs:
            self._seqs.pop(handle, None)

    # Answers

    def _answers(self, answers: Iterable[Answer], now: float, out: list[Effect]) -> None:
        for answer in answers:
            if answer.code == "unknown_client":
                self._rejoin(now, out)
                continue
            request = self.requests.get(answer.request_id)
            if request is None:
                # A submit that arrived after its cancel, or after its end: nobody wants its tokens.
                if answer.code == "accepted":
                    out.append(Cancel(client=self.client, request_id=answer.request_id))
            elif answer.code == "accepted":
                self._answered(request, out)
            elif answer.code == "unknown_request":
                self._unknown_request(request, now, out)
            elif answer.code in _TRY_LATER and request.taken:
                # It was running under another leader: its client is owed the rest.
                request.send_at = now + max(REPEAT_S, answer.retry_after_s)
            else:
                self._refused(request, answer, out)

    def _refused(self, request: OpenRequest, answer: Answer, out: list[Effect]) -> None:
        if not request.taken:
            self._forget(request)
            out.append(Refused(request, answer))
            return
        for seq in list(request.seqs.values()):
            self._end_here(seq, "error", answer.message or answer.code, out)

    def _answered(self, request: OpenRequest, out: list[Effect]) -> None:
        request.answered = True
        self._unanswered.pop(request.id, None)
        if not request.taken:
            request.taken = True
            out.append(Accepted(request))

    def _unknown_request(self, request: OpenRequest, now: float, out: list[Effect]) -> None:
        cancelling = [seq for seq in request.seqs.values() if seq.cancelling]
        if not cancelling:
            return
        for seq in cancelling:
            self._end_here(seq, "cancelled", "", out)
        if request.seqs:
            self._again(request, now, out)

    # Order of frames, and who leads

    def _follow(self, leader: Leadership, now: float, out: list[Effect]) -> bool:
        """Whether `leader` is the present one now. A higher one learns of everything that is open."""
        epoch, owner = leader
        known_epoch, known_owner = self._leader
        if epoch > MAX_EPOCH or epoch < known_epoch or (epoch == known_epoch and owner > known_owner):
            return False
        first = known_epoch == 0
        self._leader = leader
        self._start_over(1, now)
        if not first:
            self.counts.takeovers += 1
            self._resubmit(now, out)
        return True

    def _start_over(self, next_seq: int, now: float) -> None:
        self._next_seq = next_seq
        self._acked = next_seq - 1
        self._ack_at = now
        self._ack_now = False
        self._tail = (0, 0.0)

    def _resubmit(self, now: float, out: list[Effect]) -> None:
        self._rejoin_at = now + REPEAT_S
        for request in list(self.requests.values()):
            for seq in list(request.seqs.values()):
                seq.attempt = 0
                if seq.cancelling:
                    self._end_here(seq, "cancelled", "", out)
                elif (reason := complete(seq)) is not None:
                    # Its last token came, the end of it was lost with the leader.
                    self._end_here(seq, reason, "", out)
            if request.seqs:
                self._again(request, now, out)

    def _again(self, request: OpenRequest, now: float, out: list[Effect]) -> None:
        request.answered = False
        self._unanswered[request.id] = request
        self.counts.resubmitted += 1
        self._submit(request, now, out)

    def _rejoin(self, now: float, out: list[Effect]) -> None:
        """The present leader has forgotten us, e.g. because our acknowledgements did not reach it."""
        if now >= self._rejoin_at:
            self.counts.unknown_to_scheduler += 1
            self._resubmit(now, out)

    def _out_of_order(self, frame: Tokens, now: float, out: list[Effect]) -> None:
        forgotten = any(answer.code == "unknown_client" for answer in frame.answers)
        if forgotten and now - self._heard_at >= QUIET_S:
            # Whatever was between is gone with the scheduler's memory of us.
            self._start_over(frame.seq + 1, now)
            self._rejoin(now, out)
        elif frame.seq < self._next_seq:
            self.counts.duplicate_frames += 1
            self._ack_now = True
        else:
            self.counts.gaps += 1
            self._ask_again(now, out)

    def _ask_again(self, now: float, out: list[Effect]) -> None:
        if now >= self._resend_at:
            self._resend_at = now + RESEND_S
            self._ack(now, out, resend=True)

    def _beacon(self, beacon: Beacon, now: float, out: list[Effect]) -> None:
        leader = (beacon.epoch, beacon.owner)
        if leader != self._leader and not self._follow(leader, now, out):
            self.counts.stale_frames += 1
            return
        last = beacon.clients.get(self.client, 0)
        if last >= self._next_seq:
            self._tail = (last, now + TAIL_S)

    def _ack(self, now: float, out: list[Effect], *, resend: bool = False) -> None:
        epoch, owner = self._leader
        self._acked = self._next_seq - 1
        self._ack_at = now
        self._ack_now = False
        out.append(Ack(client=self.client, epoch=epoch, owner=owner, seq=self._acked, resend=resend))

    # Time

    def _tick(self, now: float, out: list[Effect]) -> None:
        for request in list(self._unanswered.values()):
            if not request.taken and now >= request.give_up_at:
                self._forget(request)
                message = f"no scheduler answered within {ANSWER_S:g} s"
                out.append(Refused(request, Answer(request.id, "no_instance", message, 2.0)))
            elif now >= request.send_at:
                self._submit(request, now, out)
        for request in list(self._cancelling.values()):
            if not request.taken and now >= request.give_up_at:
                self._unknown_request(request, now, out)
            elif now >= request.cancel_at:
                self._cancel(request, now, out)
        while self._deadlines and self._deadlines[0][0] <= now:
            self._overdue(heapq.heappop(self._deadlines)[2], now, out)
        tail, due = self._tail
        if tail >= self._next_seq and now >= due:
            self._ask_again(now, out)
        self._acknowledge(now, out)

    def _overdue(self, request_id: str, now: float, out: list[Effect]) -> None:
        request = self.requests.get(request_id)
        # An id may be used again after its end; then the entry is of its former life.
        if request is None or now < request.deadline + DEADLINE_GRACE_S:
            return
        self._cancel(request, now, out)
        for seq in list(request.seqs.values()):
            reason: FinishReason = "cancelled" if seq.cancelling else "timeout"
            self._end_here(seq, reason, "the request's time is over", out)

    def _acknowledge(self, now: float, out: list[Effect]) -> None:
        since = now - self._ack_at
        if self._acked != self._next_seq - 1 or self._ack_now:
            if since >= ACK_S:
                self._ack(now, out)
        elif self.requests and since >= LEASE_S and self.epoch:
            # Also to a leader that says nothing: one below it learns of its epoch by this.
            self._ack(now, out)
