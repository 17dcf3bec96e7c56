"""For each guard of fetches (docs/protocol.md §3): a fault that is harmless with it and breaks a property
without it."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sim_mesh import Mesh, Violation
from sim_tier import Ill
from test_sim_guards import finish, ready, tokens_of

from services.scheduler.fetching import Fetching
from services.scheduler.fleet import Fleet
from services.scheduler.instances import Instance
from services.scheduler.sequences import Sequence
from shared.client.effects import Open
from shared.wire import Beat, Sampling

Patch = Callable[[pytest.MonkeyPatch], None]
PROMPT = 48


def ask(mesh: Mesh, name: str, start: int, tokens: int = 12) -> None:
    prompt = list(range(start, start + PROMPT))
    sampling = Sampling(max_tokens=tokens, seed=1)
    mesh.clients["c0"].open(Open(request_id=name, prompt=prompt, sampling=sampling))


def restarted(seed: int, *starts: int) -> Mesh:
    """A worker that has lost the KV of these prompts, and a tier that has it."""
    mesh = Mesh(seed, blocks=40, tier=Ill())
    ready(mesh)
    for start in starts:
        ask(mesh, f"before{start}", start)
        assert mesh.run(5.0, mesh.quiet)
    mesh.kill(mesh.workers["w0"])
    mesh.start_worker("w0")
    mesh.run(1.0)
    ready(mesh)
    return mesh


def fetches(mesh: Mesh) -> int:
    assert mesh.leader is not None
    return len(mesh.leader.core.fleet.instances["w0"].fetches)


def trouble(mesh: Mesh) -> Ill:
    assert mesh.tier is not None
    return mesh.tier.ill


# G13: blocks belong to a fetch until its end has been told, whatever becomes of the sequence


def without_g13(patch: pytest.MonkeyPatch) -> None:
    original = Sequence.stop_fetching

    def stop_fetching(self: Sequence, now: float) -> None:
        fetch = self.fetch
        original(self, now)
        for instance in instances:
            if fetch is not None and instance.fetches.get(fetch.op) is fetch:
                instance.end_fetch(fetch.op, 0)

    instances: list[Instance] = []
    created = Instance.__post_init__

    def remember(self: Instance) -> None:
        created(self)
        instances.append(self)

    patch.setattr(Instance, "__post_init__", remember)
    patch.setattr(Sequence, "stop_fetching", stop_fetching)


def the_second_tier_falls_silent_in_the_middle_of_a_fetch() -> None:
    mesh = restarted(13, 0)
    trouble(mesh).lost = 1.0
    ask(mesh, "r", 0)
    assert mesh.run(2.0, lambda: fetches(mesh) == 1)
    mesh.run(1.0, lambda: tokens_of(mesh, "r") > 0)
    # Enough for others to need every block.
    for number in range(4):
        ask(mesh, f"other{number}", 100 * number + 200)
    mesh.run(4.0, mesh.quiet)
    mesh.check_books()
    if not fetches(mesh):
        raise Violation("P6: blocks were free before the fetch had ended")
    mesh.run(10.0)
    finish(mesh)


# G14: nothing is believed to be there before the end of its fetch has been told


def without_g14(patch: pytest.MonkeyPatch) -> None:
    original = Fetching.begin

    def begin(self: Fetching, instance: Instance, *rest: Any) -> bool:
        begun = original(self, instance, *rest)
        for fetch in instance.fetches.values():
            for block, block_hash in zip(fetch.blocks, fetch.hashes):
                instance.pool.confirm(block, block_hash)
            fetch.give_up = 0.0
        return begun

    patch.setattr(Fetching, "begin", begin)


def a_fetch_takes_its_time() -> None:
    mesh = restarted(14, 0)
    trouble(mesh).late = 1.0
    ask(mesh, "r", 0)
    mesh.run(1.0)
    ask(mesh, "same", 0)
    finish(mesh)


# G15: the end of a fetch counts in the session that began it


def without_g15(patch: pytest.MonkeyPatch) -> None:
    compare = Fleet._compare

    def lax(self: Fleet, instance: Instance, beat: Beat, now: float) -> list[Any]:
        if beat.fetched and beat.incarnation < instance.incarnation:
            beat = msgspec.structs.replace(beat, incarnation=instance.incarnation, info=instance.info)
        return compare(self, instance, beat, now)

    patch.setattr(Fleet, "_compare", lax)


def the_end_of_a_fetch_of_a_former_session_is_told_in_the_next() -> None:
    mesh = restarted(15, 0, 100)
    old: list[Beat] = []

    def watch(source: str, target: str, frame: Any) -> bool:
        if isinstance(frame, Beat) and frame.fetched:
            old.append(frame)
        return True

    mesh.world.filter = watch
    ask(mesh, "first", 0)
    assert mesh.run(5.0, mesh.quiet)
    (told,) = old[:1]
    # Long enough to be given up, too short to die.
    mesh.workers["w0"].cut = True
    mesh.run(3.0)
    mesh.workers["w0"].cut = False
    mesh.run(1.0)
    ready(mesh)
    trouble(mesh).lost = 1.0
    ask(mesh, "second", 100)
    assert mesh.run(2.0, lambda: fetches(mesh) == 1)
    assert mesh.leader is not None
    mesh.leader.feed(told)
    mesh.run(11.0)
    finish(mesh)


GUARDS: dict[str, tuple[Callable[[], None], Patch]] = {
    "G13": (the_second_tier_falls_silent_in_the_middle_of_a_fetch, without_g13),
    "G14": (a_fetch_takes_its_time, without_g14),
    "G15": (the_end_of_a_fetch_of_a_former_session_is_told_in_the_next, without_g15),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_the_fault_is_harmless_with_the_guard_of_fetches(guard: str):
    GUARDS[guard][0]()


@pytest.mark.parametrize("guard", GUARDS)
def test_the_fault_breaks_a_property_without_the_guard_of_fetches(
    guard: str, monkeypatch: pytest.MonkeyPatch
):
    fault, remove = GUARDS[guard]
    remove(monkeypatch)
    with pytest.raises(Violation) as caught:
        fault()
    print(f"without {guard}: {caught.value}")


def test_a_restarted_worker_gets_its_hot_prefixes_from_the_tier():
    mesh = restarted(16, 0)
    assert mesh.tier is not None
    mesh.tier.served = 0
    ask(mesh, "r", 0)
    finish(mesh)
    assert mesh.tier.served == PROMPT // 4
    end = mesh.history.lines["c0", "r", 0].end
    assert end is not None
    assert end.cached_tokens == PROMPT - 1
