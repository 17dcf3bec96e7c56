"""The instances' side: claims, canaries, results, losses, resends (docs/protocol.md §3)."""

import random
from dataclasses import dataclass

from services.scheduler.counters import Counters
from services.scheduler.desk import Desk
from services.scheduler.events import AskClaim, AskInventory, Effect, Note, SendStep
from services.scheduler.instances import FetchUnderWay, Instance, State, Verdict
from services.scheduler.sequences import Phase, Sequence
from services.scheduler.validate import known_by_name, unsound_info, unsound_result
from shared.wire import (
    Beat,
    Claim,
    Claimed,
    Done,
    Goodbye,
    InstanceInfo,
    Inventory,
    LogprobRow,
    PromptLogprobRow,
    Refused,
    Resync,
    Sampling,
    Submit,
    SubmitSeq,
    TokenRow,
)


@dataclass(frozen=True)
class FleetRules:
    """Seconds of the instances' side."""

    instance_ttl_s: float = 2.5
    """Silence that makes an instance lost."""
    claim_retry_s: float = 0.5
    canary_s: float = 20.0
    canary_tokens: int = 2
    pause_s: float = 2.0
    """After a failed canary an instance is left alone for this long."""
    resend_s: float = 0.1
    """Frames are sent again at most this often."""
    stall_s: float = 10.0
    """An instance that beats but brings no result for this long hangs. Steps are planned to last 0.5 s."""
    max_losses: int = 8
    """A sequence under which more instances than this were lost is ended: it may be what breaks them."""


CANARY = "canary-of-the-scheduler"


class Fleet:
    """Every instance heard of, whatever its state."""

    def __init__(self, rules: FleetRules, counters: Counters, desk: Desk, rng: random.Random) -> None:
        self.rules = rules
        self.instances: dict[str, Instance] = {}
        self.active: list[Instance] = []
        """Those for which frames are planned."""
        self.choices: list[Instance] = []
        """Those among which a waiting sequence may choose."""
        self.joined = False
        """Whether one has become ready since whoever asks last took note."""
        self.epoch = 0
        self.owner = ""
        self._counters = counters
        self._desk = desk
        self._rng = rng
        self._canaries: dict[Sequence, Instance] = {}

    @property
    def is_manned(self) -> bool:
        """Whether an instance serves or is about to."""
        return any(i.state in (State.CLAIMING, State.CANARY, State.READY) for i in self.instances.values())

    def infos(self) -> list[InstanceInfo]:
        """Of those that serve or soon may."""
        return [i.info for i in self.instances.values() if i.state not in (State.LOST, State.UNKNOWN)]

    def last_frames(self) -> dict[str, tuple[int, int]]:
        """For the beacon: (incarnation, last frame sent) of each instance we hold."""
        return {i.id: (i.incarnation, i.next_seq - 1) for i in self.instances.values() if i.planned}

    def clear(self) -> None:
        """Step down: keep only who exists."""
        for instance in self.instances.values():
            instance.state = State.UNKNOWN
        self._canaries = {}
        self._list()

    def _list(self) -> None:
        self.active = [i for i in self.instances.values() if i.planned]
        ready = [i for i in self.active if i.state is State.READY]
        # Whatever waits has a prompt to be computed; where nobody is there for prompts, anybody is.
        self.choices = [i for i in ready if i.info.role != "decode"] or ready

    def _turn_to(self, instance: Instance, state: State) -> Effect:
        instance.state = state
        self.joined |= state is State.READY
        self._list()
        return Note("instance", {"instance": instance.id, "state": state.value})

    # Claims

    def claim_all(self, now: float) -> list[Effect]:
        """A claim of leadership: take every instance heard of lately."""
        for name, instance in list(self.instances.items()):
            if now - instance.heard_at > self.rules.instance_ttl_s:
                del self.instances[name]
        return [effect for i in self.instances.values() for effect in self._claim(i, now)]

    def unanswered(self) -> bool:
        """Whether some claim still waits for its answer."""
        return any(i.state is State.CLAIMING for i in self.instances.values())

    def _claim(self, instance: Instance, now: float) -> list[Effect]:
        instance.claim_id = f"{self._rng.getrandbits(64):016x}"
        instance.claim_sent_at = now
        instance.pending_inventory = []
        return [self._turn_to(instance, State.CLAIMING), self._ask(instance)]

    def _ask(self, instance: Instance) -> Effect:
        claim = Claim(epoch=self.epoch, owner=self.owner, claim_id=instance.claim_id)
        return AskClaim(instance.id, claim)

    def claimed(self, name: str, claimed: Claimed, now: float) -> list[Effect]:
        """An answer to our claim, or a further page of the inventory."""
        instance = self.instances.get(name)
        if instance is None or instance.state is not State.CLAIMING or not claimed.ok:
            return []
        if claimed.claim_id != instance.claim_id and claimed.incarnation != instance.incarnation:
            return []
        instance.heard_at = now
        if reason := unsound_info(claimed.info):
            instance.claim_after = now + self.rules.pause_s
            return self.lose(instance, reason, now)
        instance.incarnation = claimed.incarnation
        instance.pending_inventory += claimed.blocks
        if claimed.next_offset:
            instance.claim_sent_at = now
            inventory = Inventory(incarnation=claimed.incarnation, offset=claimed.next_offset)
            return [AskInventory(name, inventory)]
        instance.begin_session(claimed, instance.pending_inventory)
        instance.pending_inventory = []
        effect = self._turn_to(instance, State.CANARY)
        self._desk.refuse_impossible(self.infos(), now)
        self._start_canary(instance, now)
        return [effect]

    # Canaries

    def _start_canary(self, instance: Instance, now: float) -> None:
        """Two greedy tokens through the real step path, before anybody's request."""
        vocab = instance.info.vocab_size
        submit = Submit(
            client=CANARY,
            request_id=f"canary-{instance.id}-{instance.incarnation}",
            prompt=[token % vocab for token in (1, 2, 3, 4)],
            seqs=[SubmitSeq(0, 0)],
            sampling=Sampling(max_tokens=self.rules.canary_tokens, temperature=0.0),
            priority=-1000,
            timeout_s=self.rules.canary_s,
            queue_timeout_s=self.rules.canary_s,
            pin=instance.id,
        )
        self._canaries[self._desk.canary(submit, now)] = instance

    def _watch_canaries(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for sequence, instance in list(self._canaries.items()):
            if sequence.phase is not Phase.DONE:
                continue
            del self._canaries[sequence]
            if instance.state is not State.CANARY or sequence.request.pin != instance.id:
                continue
            reason = sequence.request.client.ends[-1].reason
            if reason in ("stop", "length"):
                instance.ready_once = True
                instance.ready_at = now
                draining = instance.info.state == "draining"
                effects.append(self._turn_to(instance, State.DRAINING if draining else State.READY))
            else:
                effects.append(Note("canary_failed", {"instance": instance.id, "reason": reason}))
                effects += self.lose(instance, "its canary failed", now)
                instance.claim_after = now + self.rules.pause_s
        return effects

    # Results

    def done(self, done: Done, now: float) -> list[Effect]:
        """A result: tokens to their clients, ends, confirmed blocks, and what may be reused."""
        instance = self.instances.get(done.instance)
        if instance is None or not instance.planned:
            self._counters.stale_refused += 1
            return []
        verdict = instance.judge(done, self.epoch, self.owner)
        if verdict is Verdict.FOREIGN:
            self._counters.stale_refused += 1
            return []
        instance.heard_at = now
        if verdict is Verdict.KNOWN:
            return []
        if verdict is Verdict.GAP:
            return self._resend(instance, instance.expected, now)
        if reason := unsound_result(done, len(instance.table)):
            instance.claim_after = now + self.rules.pause_s
            return self.lose(instance, f"its result is wrong: {reason}", now)
        instance.progress_at = now
        frame = instance.in_flight.popleft()
        instance.ahead_s = instance.ahead_s - frame.cost_s if instance.in_flight else 0.0
        table = instance.table
        for slot, token in zip(done.slots, done.tokens):
            sequence = table[slot]
            if sequence is not None:
                out, pending = sequence.out, sequence.row
                frame_seq = sequence.request.client.seq
                if (
                    pending is not None
                    and sequence.row_since == frame_seq
                    and pending.attempt == sequence.attempt
                ):
                    # A second result in this turn: the row is still pending.
                    pending.ids.append(token)
                else:
                    pending = TokenRow(sequence.handle, sequence.attempt, len(out), [token])
                    sequence.row, sequence.row_since = pending, frame_seq
                    sequence.emit(pending)
                out.append(token)
        counters = self._counters
        counters.steps += 1
        counters.tokens += len(done.slots)
        for row in done.stored:
            instance.pool.confirm(row.block, row.hash)  # type: ignore[arg-type]
        for first in frame.firsts:
            if first.instance is instance and first.phase is Phase.PREFILL:
                first.enter(Phase.DECODE, now)
                if first.request.warming is first:
                    first.request.warming = None
        if done.logprobs or done.prompt_logprobs:
            self._logprobs(instance, done)
        for stopped in done.stopped:
            sequence = table[stopped.slot]
            if sequence is not None:
                self._desk.finish(sequence, stopped.reason, stopped.detail, now)
        instance.expected = done.seq + 1
        instance.settle(done.seq)
        timing = done.timing
        counters.busy_us += timing.run_us
        counters.idle_us += timing.idle_us
        instance.observe(timing, now)
        return self._watch_canaries(now) if self._canaries else []

    def _logprobs(self, instance: Instance, done: Done) -> None:
        for row in done.logprobs:
            sequence = instance.table[row.slot]
            if sequence is not None:
                rows = sequence.request.client.logprobs
                rows.append(LogprobRow(sequence.handle, len(sequence.out) - 1, [row.chosen], [row.top]))
        for part in done.prompt_logprobs:
            sequence = instance.table[part.slot]
            if sequence is not None:
                chosen = PromptLogprobRow(sequence.handle, part.start, part.chosen, part.top)
                sequence.request.client.prompt_logprobs.append(chosen)

    def _resend(self, instance: Instance, first: int, now: float) -> list[Effect]:
        """Frames from `first` on once more; rank 0 repeats results it has (G8)."""
        if now - instance.resent_at < self.rules.resend_s:
            return []
        instance.resent_at = now
        frames = [frame.step for frame in instance.in_flight if frame.step.seq >= first]
        self._counters.frames_resent += len(frames)
        return [SendStep(step) for step in frames]

    # Signs of life

    def beat(self, beat: Beat, claiming: bool, now: float) -> list[Effect]:
        """A sign of life. `claiming`: whether we lead or are about to, and so may claim it."""
        info = beat.info
        instance = self.instances.get(info.instance)
        if instance is None:
            if not known_by_name(info):
                return []
            instance = self.instances[info.instance] = Instance(info.instance, info, now)
        instance.heard_at = now
        if not claiming:
            instance.info = info
            return []
        effects: list[Effect] = []
        if instance.planned:
            effects += self._compare(instance, beat, now)
        elif instance.state is State.CLAIMING:
            pass
        elif info.state != "starting" and now >= instance.claim_after:
            # Also one that reports a failure: a session broken by a frame is healed by a claim.
            instance.info = info
            effects += self._claim(instance, now)
        return effects

    def _compare(self, instance: Instance, beat: Beat, now: float) -> list[Effect]:
        """A beat of an instance we hold: is it the session we think it is, and has a result been lost?"""
        info = beat.info
        if info.born > instance.info.born or beat.incarnation > instance.incarnation:
            effects = self.lose(instance, "it began a new life", now)
            if info.state == "failed":
                instance.claim_after = now + self.rules.pause_s
            return effects
        if info.born < instance.info.born or beat.incarnation < instance.incarnation:
            return []
        effects = []
        if info.state == "failed":
            return self.lose(instance, "it reports a failure", now)
        for row in beat.fetched:
            if (fetch := instance.end_fetch(row.op, row.count)) is not None:
                self._fetched(fetch, min(row.count, len(fetch.blocks)), info.block_tokens, now)
        if info.state == "draining" and instance.state is State.READY:
            effects.append(self._turn_to(instance, State.DRAINING))
            self._release_fetchers(instance, now)
        elif info.state == "ready" and instance.state is State.DRAINING:
            effects.append(self._turn_to(instance, State.READY))
        role, instance.info = instance.info.role, info
        if info.role != role:
            self._list()
        if instance.in_flight and beat.done_seq >= instance.expected:
            if instance.stuck_at == instance.expected:
                effects += self._resend(instance, instance.expected, now)
            instance.stuck_at = instance.expected
        else:
            instance.stuck_at = 0
        return effects

    def _fetched(self, fetch: FetchUnderWay, count: int, block_tokens: int, now: float) -> None:
        self._counters.fetches += 1
        self._counters.fetches_short += count < len(fetch.blocks)
        if fetch.waits:
            if fetch.sequence.offloaded is not None:
                self._counters.offload_saved_tokens += count * block_tokens
            fetch.sequence.stop_fetching(now)

    def resync(self, resync: Resync, now: float) -> list[Effect]:
        """A gap: everything after the last frame it had, again."""
        instance = self.instances.get(resync.instance)
        if instance is None or not instance.planned:
            return []
        instance.heard_at = now
        if resync.incarnation != instance.incarnation:
            return []
        return self._resend(instance, resync.have_seq + 1, now)

    def refused(self, refused: Refused, now: float) -> list[Effect]:
        """Somebody's frame was refused there. If it was ours, the next beat shows another incarnation; if it
        was a fenced leader's, it is none of our business."""
        self._counters.stale_refused += 1
        return []

    def goodbye(self, goodbye: Goodbye, now: float) -> list[Effect]:
        """It ends on purpose: its sequences go elsewhere at once."""
        instance = self.instances.get(goodbye.instance)
        if instance is None or goodbye.incarnation < instance.incarnation:
            return []
        effects = self.lose(instance, goodbye.reason or "it ended", now)
        instance.heard_at = float("-inf")
        return effects

    def lose(self, instance: Instance, reason: str, now: float) -> list[Effect]:
        """Requeue its sequences as new attempts; what it may still say belongs to a dead session."""
        if instance.state is State.LOST:
            return []
        effects: list[Effect] = []
        if instance.planned:
            self._counters.instances_lost += 1
            self._release_fetchers(instance, now)
            for sequence in list(instance.running):
                instance.leave(sequence)
                if sequence in self._canaries:
                    continue
                self._requeue(sequence, now)
        for sequence in [seq for seq, at in self._canaries.items() if at is instance]:
            del self._canaries[sequence]
            if sequence.phase is not Phase.DONE:
                self._desk.end(sequence, "error", "", now)
        effects.append(Note("instance_lost", {"instance": instance.id, "reason": reason}))
        effects.append(self._turn_to(instance, State.LOST))
        return effects

    def _release_fetchers(self, instance: Instance, now: float) -> None:
        """Who waits for a fetch there may go elsewhere, and fetch there: it did not fail."""
        for fetch in instance.fetchers:
            fetch.sequence.stop_fetching(now)
            fetch.sequence.fetch_tried = 0

    def _requeue(self, sequence: Sequence, now: float) -> None:
        sequence.losses += 1
        if sequence.losses > self.rules.max_losses:
            message = f"{sequence.losses} instances were lost while they worked on it; it is not tried again"
            self._desk.end(sequence, "error", message, now)
            return
        self._counters.requeued += 1
        self._desk.requeue(sequence, now)

    # Time

    def tick(self, now: float) -> list[Effect]:
        """Silence, hung instances, unanswered claims."""
        effects: list[Effect] = []
        if self._canaries:
            effects += self._watch_canaries(now)
        for instance in list(self.instances.values()):
            silent = now - instance.heard_at > self.rules.instance_ttl_s
            if silent and instance.state is not State.LOST:
                effects += self.lose(instance, "it was silent", now)
            elif self._hangs(instance, now):
                effects += self.lose(instance, "it brought no result", now)
                instance.claim_after = now + self.rules.pause_s
            elif any(now > fetch.end_by for fetch in instance.fetches.values()):
                effects += self.lose(instance, "it never told how a fetch ended", now)
            elif instance.state is State.CLAIMING and now - instance.claim_sent_at > self.rules.claim_retry_s:
                instance.claim_sent_at = now
                instance.pending_inventory = []
                effects.append(self._ask(instance))
            if now - instance.heard_at > 60.0 and instance.state is State.LOST:
                del self.instances[instance.id]
        return effects

    def _hangs(self, instance: Instance, now: float) -> bool:
        """It beats but brings no result. A canary, which may warm up a device, has its own deadline."""
        waits = instance.in_flight and instance.state in (State.READY, State.DRAINING)
        return bool(waits) and now - instance.progress_at > self.rules.stall_s

    def forgive(self, now: float) -> None:
        """We were deaf: no instance was silent meanwhile."""
        for instance in self.instances.values():
            instance.heard_at = max(instance.heard_at, now)
            instance.progress_at = now
            for fetch in instance.fetches.values():
                fetch.end_by = max(fetch.end_by, now + (fetch.end_by - fetch.begun))

    def check(self) -> None:
        """Raises AssertionError where an instance's books contradict each other."""
        for instance in self.instances.values():
            if instance.planned:
                instance.check()
