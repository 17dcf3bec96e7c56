"""One seeded run: a mesh, its requests, and a plan of faults; everything heals in the end and is judged."""

import random
from dataclasses import dataclass, field

from sim_mesh import Mesh, Optimist, Violation
from sim_nodes import ClientNode
from sim_tier import Ill
from sim_world import Weather

from services.scheduler.admission import ExpectedOutput
from shared.client.effects import Open
from shared.wire import Sampling

TROUBLE_S = 4.5
"""Requests and faults begin within this time."""
HEAL_S = 40.0
"""Virtual time after the last fault by which everything must have ended."""


@dataclass
class Plan:
    """What a seed stands for, for people who replay it."""

    seed: int
    log: list[str] = field(default_factory=list)
    healed_s: float = TROUBLE_S
    """Time from the start by which every fault is over."""

    def note(self, mesh: Mesh, text: str) -> None:
        self.log.append(f"{mesh.world.now - 1000:7.3f}  {text}")


def run_seed(seed: int, *, careful: bool = False) -> Mesh:
    """Raises `Violation` (or whatever broke), with the seed and the faults in its notes."""
    plan = Plan(seed)
    mesh = None
    try:
        mesh = _prepare(seed, plan)
        _judge(mesh, plan, careful)
    except Exception as error:
        error.add_note(f"HORTATOR_SIM_SEED={seed} pytest tests/sim replays this")
        for line in plan.log:
            error.add_note(line)
        raise
    return mesh


def _prepare(seed: int, plan: Plan) -> Mesh:
    rng = random.Random(seed * 7919 + 1)
    tier = _plan_tier(seed)
    mesh = Mesh(
        seed,
        workers=rng.choice((1, 1, 2, 2, 3)),
        schedulers=rng.choice((1, 1, 2)),
        clients=rng.choice((1, 2)),
        blocks=rng.choice((18, 18, 24, 64)) if tier is None else rng.choice((24, 24, 32, 64)),
        slots=rng.choice((2, 4, 8)),
        # Short steps have many frames in flight.
        step_s=rng.choice((0.015, 0.015, 0.0004)),
        reservation=rng.choice((ExpectedOutput, Optimist)),
        tier=tier,
    )
    mesh.world.weather = rng.choice(
        (Weather(), Weather(drop=0.02), Weather(double=0.05), Weather(late=0.05), Weather(0.03, 0.03, 0.03))
    )
    for number in range(rng.randint(4, 9) if tier is None else rng.randint(6, 14)):
        _plan_request(mesh, plan, rng, number)
    for _ in range(rng.randint(1, 4)):
        _plan_fault(mesh, plan, rng)
    return mesh


def _plan_tier(seed: int) -> Ill | None:
    """Half of the seeds have a second tier, most of these one that fails."""
    if seed % 2:
        return None
    rng = random.Random(seed)
    return rng.choice((
        Ill(), Ill(short=0.3), Ill(late=0.3), Ill(lost=0.2), Ill(forged=0.5, deaf=0.2),
        Ill(late=0.2, short=0.2, lost=0.1, forged=0.2, deaf=0.1),
    ))  # fmt: skip


def _plan_request(mesh: Mesh, plan: Plan, rng: random.Random, number: int) -> None:
    client = rng.choice(list(mesh.clients.values()))
    # Few distinct beginnings, so that prefixes are shared; lengths around block boundaries.
    start = rng.randrange(3) * 100
    length = rng.randint(1, 24) if mesh.tier is None else rng.randint(1, 48)
    prompt = [start + i for i in range(length)]
    max_tokens = rng.randint(1, 40)
    hasty = rng.random() < 0.15
    spec = Open(
        request_id=f"r{number}",
        prompt=prompt,
        sampling=Sampling(
            max_tokens=max_tokens,
            seed=rng.randrange(4),
            stop_token_ids=tuple(range(0, 1000, 31)) if rng.random() < 0.5 else (),
            min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        ),
        sinks=(None,) * rng.choice((1, 1, 1, 2, 3)),
        priority=rng.choice((0, 0, 0, 1, -1)),
        timeout_s=rng.uniform(0.3, 3.0) if hasty else 200.0,
        queue_timeout_s=100.0,
    )
    start_s = rng.triangular(0.0, TROUBLE_S, 1.6)
    mesh.world.after(start_s, lambda: client.open(spec))
    if rng.random() < 0.15:
        mesh.world.after(start_s + rng.uniform(0.0, 2.0), lambda: _cancel(mesh, plan, client, spec))


def _cancel(mesh: Mesh, plan: Plan, client: ClientNode, spec: Open) -> None:
    plan.note(mesh, f"{client.name} cancels {spec.request_id}")
    client.close(spec.request_id)


def _plan_fault(mesh: Mesh, plan: Plan, rng: random.Random) -> None:
    when = rng.uniform(1.6, TROUBLE_S)
    fault = rng.choice((kill_worker, stop_worker, cut_worker, kill_scheduler, stop_scheduler, cut_scheduler,
                        kill_client, cut_client, flush_redis, lose_redis, storm,
                        end_worker, end_scheduler, drain_worker))  # fmt: skip
    lasting = rng.choice((0.05, 0.3, 1.2, 2.0, 4.0))
    if fault in (cut_client, stop_worker, stop_scheduler, cut_scheduler) and rng.random() < 0.2:
        lasting = 12.0
    plan.healed_s = max(plan.healed_s, when + lasting)
    pick = rng.random()
    mesh.world.after(when, lambda: fault(mesh, plan, lasting, pick))


def _of(nodes: list, pick: float):
    alive = [node for node in nodes if node.alive]
    return alive[int(pick * len(alive))] if alive else None


def kill_worker(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if (worker := _of(list(mesh.workers.values()), pick)) is not None:
        plan.note(mesh, f"kill {worker.name}, back in {lasting} s")
        mesh.kill(worker)
        mesh.world.after(lasting, lambda: mesh.start_worker(worker.name))


def kill_scheduler(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if (scheduler := _of(list(mesh.schedulers.values()), pick)) is not None:
        plan.note(mesh, f"kill {scheduler.name}, another in {lasting} s")
        mesh.kill(scheduler)
        mesh.world.after(lasting, mesh.start_scheduler)


def end_worker(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if (worker := _of(list(mesh.workers.values()), pick)) is not None and not worker.stopped:
        plan.note(mesh, f"end {worker.name} in order, back in {lasting} s")
        mesh.to_schedulers(worker, worker.session.goodbye("stopped"))
        mesh.kill(worker)
        mesh.world.after(lasting, lambda: mesh.start_worker(worker.name))


def end_scheduler(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if (scheduler := _of(list(mesh.schedulers.values()), pick)) is not None:
        plan.note(mesh, f"end {scheduler.name} in order, another in {lasting} s")
        scheduler.shut_down()
        mesh.kill(scheduler)
        mesh.world.after(lasting, mesh.start_scheduler)


def drain_worker(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if (worker := _of(list(mesh.workers.values()), pick)) is not None:
        plan.note(mesh, f"drain {worker.name} for {lasting} s")
        worker.session.drain(False)
        mesh.world.after(lasting, lambda: worker.session.drain(True))


def kill_client(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    if len(mesh.clients) > 1 and (client := _of(list(mesh.clients.values()), pick)) is not None:
        plan.note(mesh, f"kill {client.name}")
        mesh.kill(client)


def _stop(mesh: Mesh, plan: Plan, node, lasting: float) -> None:
    if node is not None and not node.stopped:
        plan.note(mesh, f"stop {node.name} for {lasting} s")
        mesh.world.stop(node)
        mesh.world.after(lasting, lambda: mesh.world.wake(node))


def _cut(mesh: Mesh, plan: Plan, node, lasting: float) -> None:
    if node is not None and not node.cut:
        plan.note(mesh, f"cut {node.name} off for {lasting} s")
        node.cut = True
        mesh.world.after(lasting, lambda: setattr(node, "cut", False))


def stop_worker(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    _stop(mesh, plan, _of(list(mesh.workers.values()), pick), lasting)


def cut_worker(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    _cut(mesh, plan, _of(list(mesh.workers.values()), pick), lasting)


def stop_scheduler(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    _stop(mesh, plan, _of(list(mesh.schedulers.values()), pick), lasting)
    if pick < 0.3:
        mesh.start_scheduler()


def cut_scheduler(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    _cut(mesh, plan, _of(list(mesh.schedulers.values()), pick), lasting)


def cut_client(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    _cut(mesh, plan, _of(list(mesh.clients.values()), pick), lasting)


def flush_redis(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    plan.note(mesh, "flush Redis")
    mesh.redis.flush()


def lose_redis(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    plan.note(mesh, f"Redis away for {lasting} s")
    mesh.redis.up = False
    mesh.world.after(lasting, lambda: setattr(mesh.redis, "up", True))


def storm(mesh: Mesh, plan: Plan, lasting: float, pick: float) -> None:
    plan.note(mesh, f"storm for {lasting} s")
    before = mesh.world.weather
    mesh.world.weather = Weather(drop=0.3, double=0.2, late=0.2)
    mesh.world.after(lasting, lambda: setattr(mesh.world, "weather", before))


def _judge(mesh: Mesh, plan: Plan, careful: bool) -> None:
    mesh.run(plan.healed_s + 0.1, careful=careful)
    mesh.world.weather = Weather()
    plan.note(mesh, "all is well")
    if not mesh.run(HEAL_S, mesh.quiet, careful=careful):
        mesh.history.check(allow_trouble=False)
        raise Violation("P5: clients still wait after everything healed")
    # Dead clients' leases lapse, and the last releases go out.
    for _ in range(30):
        mesh.run(0.5)
        if _at_rest(mesh):
            break
    mesh.history.check(allow_trouble=False)
    mesh.check_baseline()


def _at_rest(mesh: Mesh) -> bool:
    try:
        mesh.check_baseline()
    except Violation:
        return False
    return True
