"""The parts of a simulated mesh: the real core, the real gate, session and batch of the worker, and the real
client core, on virtual time.

The executor really keeps what was written to KV, block by block, and draws each token from a hash of what
it *reads* there; so a block that was reused too early, shared wrongly or filled by a stale frame shows as a
wrong token, not as luck.
"""

import random
import zlib
from collections import deque
from typing import Any

import numpy as np
from sim_tier import ROW
from sim_world import Node, Redis, World

from services.scheduler.budget import BudgetRules
from services.scheduler.core import Core, Rules
from services.scheduler.events import (
    AskClaim,
    AskInventory,
    ClaimAnswer,
    Connected,
    DropLease,
    Effect,
    Hint,
    LeaseSeen,
    LookUp,
    SendBeacon,
    SendStep,
    SendTokens,
    Stop,
    Tick,
    Turn,
    WriteLease,
)
from services.scheduler.fetching import FetchRules
from services.scheduler.policy import ContinuousPolicy
from services.worker.compute import BrokenSession, Compute, Outcome
from services.worker.gate import ClaimVerdict
from services.worker.session import Reaction, Session
from services.worker.slots import Batch, BatchShape
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from shared.client.core import ClientCore
from shared.client.effects import Accepted, Close, Ended, Open, Progress, Refused
from shared.client.effects import Tick as ClientTick
from shared.wire import (
    Ack,
    Beacon,
    Cancel,
    Claim,
    Claimed,
    Fetch,
    Fetched,
    InstanceInfo,
    Inventory,
    Sampling,
    Step,
    Submit,
)

VOCAB = 1000
BLOCK = 4
FINGERPRINT = "sim"


def draw(seed: int, choice: int, context: bytes) -> int:
    """Next token of a sequence: a hash of its sampling key and all of its context."""
    return zlib.crc32(context, seed * 31 + choice & 0xFFFFFFFF) % VOCAB


def reference(prompt: list[int], sampling: Sampling, choice: int) -> tuple[list[int], str]:
    """Output and finish reason of an undisturbed run."""
    ids = list(prompt)
    for count in range(1, sampling.max_tokens + 1):
        token = draw(sampling.seed, choice, np.array(ids, np.int32).tobytes())
        ids.append(token)
        if token in sampling.stop_token_ids and count > sampling.min_tokens:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


class KvExecutor:
    """Writes ids into blocks and reads every context back through the block table."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.kv = np.full((info.blocks_total, info.block_tokens), -1, np.int32)
        self.step_s = info.decode_step_s
        self.spent_s = 0.0

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        size = self.info.block_tokens
        for source, target in step.copies:
            self.kv[target] = self.kv[source]
        tokens = []
        rows = zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist())
        for slot, start, count, samples in rows:
            end = start + count
            table = slots.block_table[slot, : -(-end // size)]
            for position in range(start, end):
                self.kv[table[position // size], position % size] = slots.tokens[slot, position]
            if not samples:
                tokens.append(-1)
                continue
            sampling = slots.sampling[slot]
            assert sampling is not None
            tokens.append(
                draw(sampling.seed, int(slots.choice[slot]), self.kv[table].reshape(-1)[:end].tobytes())
            )
        self.spent_s += self.step_s + self.step_s / 15 * int(step.counts.sum())
        return StepOutput(np.array(tokens, np.int32))

    def close(self) -> None:
        return


class WorkerNode(Node):
    """One life of an instance process."""

    def __init__(self, mesh: Any, name: str, blocks: int, slots: int) -> None:
        super().__init__(name)
        self.mesh = mesh
        self.world: World = mesh.world
        self.born = self._fresh(0)
        info = ExecutorInfo(FINGERPRINT, BLOCK, blocks, 256, VOCAB, 15.0 / mesh.step_s, mesh.step_s)
        self.executor = KvExecutor(info)
        shape = BatchShape(slots, info.max_len, BLOCK, blocks, VOCAB)
        self.compute = Compute(
            self.executor, Batch(shape, FINGERPRINT), clock=lambda: self.world.now + self.executor.spent_s
        )
        tier = ROW if mesh.tier is not None else ""
        self.session = Session(
            InstanceInfo(name, mesh.model, FINGERPRINT, "mixed", "ready", self.born, BLOCK, blocks, slots,
                         info.max_len, VOCAB, 64, info.prefill_tok_s, info.decode_step_s, tier=tier,
                         tier_fixed_s=mesh.step_s / 50, tier_block_s=mesh.step_s / 100)
        )  # fmt: skip
        self.last = self.born
        self.queue: deque[Step] = deque()
        self.busy = False
        self.steps = 0
        self.faults: list[str] = []
        self.world.every(self, 0.5, self._beat)

    def _fresh(self, last: int) -> int:
        return max(int(self.world.now * 1e6), last + 1)

    def fresh(self) -> int:
        self.last = self._fresh(self.last)
        return self.last

    def _beat(self) -> None:
        self.mesh.to_schedulers(self, self.session.beat())

    def on_step(self, frame: Step) -> None:
        _, reaction = self.session.on_step(frame, self.world.now)
        if reaction.run:
            self.queue.append(frame)
            self._next()
        else:
            self._react(reaction)

    def on_beacon(self, beacon: Beacon) -> None:
        self._react(self.session.on_beacon(beacon, self.world.now))

    def on_claim(self, claim: Claim) -> Claimed:
        verdict, incarnation = self.session.on_claim(claim, self.fresh())
        if verdict is ClaimVerdict.REFUSED:
            return self._claimed(False, incarnation, claim.claim_id, [], 0)
        if verdict is ClaimVerdict.ACCEPTED:
            self.queue.clear()
            self.compute.session = incarnation
            blocks, after = self.compute.begin()
        else:
            blocks, after = self.compute.page(0)
        return self._claimed(True, incarnation, claim.claim_id, blocks, after)

    def on_inventory(self, ask: Inventory) -> Claimed:
        current = self.session.gate.incarnation
        if ask.incarnation != current:
            return self._claimed(False, current, "", [], 0)
        return self._claimed(True, current, "", *self.compute.page(ask.offset))

    def _claimed(self, ok: bool, incarnation: int, claim_id: str, blocks: list[Any], after: int) -> Claimed:
        highest = self.session.gate.highest
        return Claimed(
            ok=ok,
            epoch=highest.epoch,
            owner=highest.owner,
            incarnation=incarnation,
            info=self.session.info,
            claim_id=claim_id,
            blocks=blocks,
            next_offset=after,
        )

    def _next(self) -> None:
        if self.busy or not self.queue:
            return
        frame = self.queue.popleft()
        before = self.executor.spent_s
        if frame.offload:
            self._keep(frame.offload)
        outcome = self.compute.step(frame, self.world.now)
        if isinstance(outcome, Outcome):
            self._keep([row.block for row in outcome.done.stored])
            for fetch in frame.fetch:
                self._fetch(fetch, frame.incarnation)
        took_s = max(self.executor.spent_s - before, 0.0001)
        self.executor.spent_s = 0.0
        self.busy = True
        self.world.after(took_s, lambda: self._computed(outcome))

    def _computed(self, outcome: Any) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((lambda _: self._computed(outcome), None))
            return
        self.busy = False
        if isinstance(outcome, BrokenSession):
            self.faults.append(str(outcome.fault))
            if self.session.on_broken(outcome.incarnation, str(outcome.fault), self.fresh()):
                self._beat()
        elif outcome is not None:
            self.steps += 1
            if self.session.on_result(outcome.done):
                self.mesh.to_schedulers(self, outcome.done)
        self._next()

    # The second tier

    def _keep(self, blocks: list[int]) -> None:
        if (tier := self.mesh.tier) is not None:
            for block in blocks:
                if (block_hash := self.compute.batch.hashes.of(block)) is not None:
                    tier.keep(block_hash, self.executor.kv[block])

    def _fetch(self, fetch: Fetch, session: int) -> None:
        late_s, found = self.mesh.tier.answer(fetch.hashes)
        info = self.session.info
        usual_s = info.tier_fixed_s + len(fetch.blocks) * info.tier_block_s
        self.world.after(usual_s + late_s, lambda: self._fetched(fetch, session, found))

    def _fetched(self, fetch: Fetch, session: int, found: list[Any]) -> None:
        if not self.alive or session != self.compute.session or session != self.session.gate.incarnation:
            return
        if self.stopped:
            self.backlog.append((lambda _: self._fetched(fetch, session, found), None))
            return
        for block in fetch.blocks:
            self.executor.kv[block] = -7
        for block, content in zip(fetch.blocks, found):
            self.executor.kv[block] = content
        self.compute.batch.fetched(fetch.op, len(found))
        if self.session.on_fetched(session, Fetched(fetch.op, len(found))):
            self._beat()

    def _react(self, reaction: Reaction) -> None:
        if reaction.done is not None:
            self.mesh.to_schedulers(self, reaction.done)
        for message in reaction.say:
            self.mesh.to_schedulers(self, message)


class SchedulerNode(Node):
    """One life of a scheduler process: the real core and a stand-in for its shell."""

    def __init__(self, mesh: Any, name: str) -> None:
        super().__init__(name)
        self.mesh = mesh
        self.world: World = mesh.world
        self.redis: Redis = mesh.redis
        rules = Rules(
            model=mesh.model,
            budget=BudgetRules(itl_target_s=2 * mesh.step_s, floor_tokens=4),
            # Prompts here are short, so little has to be enough.
            fetch=FetchRules(lookup_s=mesh.step_s / 10, share=1.0, patience_s=mesh.patience_s),
        )
        self.core = Core(
            name, rules, ContinuousPolicy(), mesh.reservation(),
            rng=random.Random(self.world.rng.getrandbits(32)), now=self.world.now,
        )  # fmt: skip
        self.lease: tuple[int, str] | None = None
        self._turning = False
        self.world.every(self, 0.1, self._tick)
        self.world.every(self, 0.5, self._lease_round)

    def feed(self, event: Any) -> None:
        self._carry_out(self.core.handle(event, self.world.now))
        if not self._turning and self.core.leads:
            self._turning = True
            self.world.after(0.0, self._turn)

    def _turn(self) -> None:
        self._turning = False
        if self.alive and not self.stopped:
            effects = self.core.handle(Turn(), self.world.now)
            self._carry_out(effects)

    def _tick(self) -> None:
        if self.cut == self.core.connected:
            self.feed(Connected(not self.cut))
        self.feed(Tick())

    def _lease_round(self) -> None:
        redis, now = self.redis, self.world.now
        if not redis.up:
            self.feed(LeaseSeen(known=False))
            return
        if self.lease is not None and redis.write(*self.lease, 2.0, now):
            return
        highest, holder = redis.read(now)
        if holder is None:
            self.feed(LeaseSeen(known=True, epoch=highest))
        else:
            self.feed(LeaseSeen(known=True, epoch=max(holder[0], highest), owner=holder[1], ttl_s=2.0))

    def shut_down(self) -> None:
        self._carry_out(self.core.handle(Stop(), self.world.now))
        self.alive = False

    def _carry_out(self, effects: list[Effect]) -> None:
        mesh = self.mesh
        for effect in effects:
            if isinstance(effect, SendStep):
                mesh.to_worker(self, effect.step.instance, effect.step, "on_step")
            elif isinstance(effect, SendTokens):
                mesh.to_client(self, effect.client, effect.tokens)
            elif isinstance(effect, SendBeacon):
                mesh.to_all(self, effect.beacon)
            elif isinstance(effect, AskClaim):
                self._ask(effect.instance, effect.claim, "on_claim")
            elif isinstance(effect, AskInventory):
                self._ask(effect.instance, effect.inventory, "on_inventory")
            elif isinstance(effect, LookUp):
                self._look_up(effect)
            elif isinstance(effect, WriteLease):
                self.lease = (effect.epoch, effect.owner)
                if self.redis.up:
                    self.redis.write(effect.epoch, effect.owner, 2.0, self.world.now)
            elif isinstance(effect, DropLease):
                if self.redis.up and self.redis.holder == (effect.epoch, effect.owner):
                    self.redis.holder = None
            elif type(effect).__name__ == "Follow":
                self.lease = None

    def _look_up(self, effect: LookUp) -> None:
        tier, world = self.mesh.tier, self.world
        blocks: dict[str, int] = {}
        if self.redis.up and tier is not None and tier.rng.random() >= tier.ill.deaf:
            blocks = {ROW: tier.depth(list(effect.hashes))}

        def answer() -> None:
            if self.alive and not self.stopped:
                self.feed(Hint(effect.client, effect.handles, blocks))

        world.after(effect.hold_s * world.rng.uniform(0.2, 1.05), answer)

    def _ask(self, instance: str, message: Any, method: str) -> None:
        world = self.world
        worker = self.mesh.workers.get(instance)
        if worker is None:
            return

        def answer(frame: Any) -> None:
            reply = getattr(worker, method)(frame)
            world.send(worker, self, reply, lambda claimed: self.feed(ClaimAnswer(instance, claimed)))

        world.send(self, worker, message, answer)


class ClientNode(Node):
    """One life of a client: the real client core; its history is what the checker judges."""

    def __init__(self, mesh: Any, name: str) -> None:
        super().__init__(name)
        self.mesh = mesh
        self.world: World = mesh.world
        self.core = ClientCore(name)
        self.history = mesh.history
        self.world.every(self, 0.05, self._tick)

    def open(self, spec: Open) -> None:
        if self.alive:
            self.history.opened(self, spec)
            self._carry_out(self.core.handle(spec, self.world.now))

    def close(self, request_id: str, choices: tuple[int, ...] = ()) -> None:
        if self.alive and request_id in self.core.requests:
            self.history.cancelled(self, request_id, choices)
            self._carry_out(self.core.handle(Close(request_id, choices), self.world.now))

    def feed(self, event: Any) -> None:
        self._carry_out(self.core.handle(event, self.world.now))

    def _tick(self) -> None:
        if self.core.is_busy:
            self.feed(ClientTick())

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Submit | Cancel | Ack):
                self.mesh.to_schedulers(self, effect)
            elif isinstance(effect, Progress):
                for seq, ids in effect.rows:
                    self.history.progress(self, seq, ids)
            elif isinstance(effect, Ended):
                self.history.ended(self, effect.seq, effect.end)
            elif isinstance(effect, Refused):
                self.history.refused(self, effect.request, effect.answer)
            elif isinstance(effect, Accepted):
                continue
