"""Rank 0's side: it forms the group, passes on what it computes, and is told when a rank is lost."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import structlog

from services.worker.collective.port import Collective, GroupLost
from services.worker.group.facts import difference, facts_built, facts_of
from services.worker.group.layout import Layout, layout_of, rank_settings
from services.worker.group.local import start_local
from services.worker.group.members import Members
from services.worker.group.membership import (
    LIMIT_S,
    SPIN_US,
    Membership,
    can_native,
    make_memory,
    most_floats,
)
from services.worker.group.messages import Begin, Close, Follow, Measure, Refusal, Tune, Welcome
from services.worker.settings import WorkerSettings, parse_cores
from services.worker.step import Executor
from shared.runtime.settings import CannotStart
from shared.wire import Step
from shared.wire.base import encode

CLOSE_S = 3.0
"""Ranks may take this long to end when told to."""


class Lead:
    """The other ranks do what this one does: told before it does so itself, in the order of its calls."""

    def __init__(self, members: Members, membership: Membership) -> None:
        self._members = members
        self._membership = membership

    @property
    def size(self) -> int:
        return self._membership.size

    def follow(self, frame: Step, behind: bool, check: int) -> None:
        self._members.send(Follow(encode(frame), behind, check))

    def begin(self) -> None:
        self._members.send(Begin())

    def tune(self, state: dict[str, Any]) -> None:
        self._members.send(Tune(state))

    def measure(self, name: str) -> None:
        self._members.send(Measure(name))

    def when_lost(self, then: Callable[[GroupLost], None]) -> None:
        self._members.when_lost(then)

    def explained(self, error: GroupLost) -> GroupLost:
        return self._members.explained(error)

    def detail(self) -> dict[str, str]:
        """Where the ranks run, for people."""
        pids = [f"0: {os.getpid()}"]
        for member in self._members.each.values():
            if member.hello is not None:
                at = f" on {member.hello.host}" if member.hello.node else ""
                pids.append(f"{member.rank}: {member.hello.pid}{at}")
        return {"ranks": ", ".join(pids)}

    def close(self) -> None:
        """Idempotent; the ranks have ended when it returns."""
        self._members.expect_ends()
        with contextlib.suppress(GroupLost):
            self._members.send(Close())
        self._members.close(CLOSE_S)
        self._membership.close()


def lead(
    settings: WorkerSettings, build: Callable[[WorkerSettings, Collective], Executor]
) -> tuple[Executor, Lead]:
    """Start this node's other ranks, wait for those of other nodes, and build what rank 0 computes with.

    Raises `CannotStart` with what keeps the group from forming, and what `build` raises.
    """
    layout = layout_of(settings)
    membership = Membership(0, layout.size)
    members = Members(range(1, layout.size), membership.abort)
    try:
        return _formed(settings, layout, members, membership, build)
    except GroupLost as error:
        members.expect_ends()
        raise CannotStart(str(members.explained(error))) from error
    except TimeoutError as error:
        raise CannotStart(str(error)) from error
    finally:
        if not members.complete:
            members.close(0.0)
            membership.close()


def _formed(
    settings: WorkerSettings,
    layout: Layout,
    members: Members,
    membership: Membership,
    build: Callable[[WorkerSettings, Collective], Executor],
) -> tuple[Executor, Lead]:
    native = can_native()
    floats = most_floats(settings)
    spare = len(parse_cores(settings.cores) or os.sched_getaffinity(0))
    own = {rank: rank_settings(settings, layout, rank, spare) for rank in layout.ranks_of(0)}
    if native:
        membership.memory_fd = make_memory(layout.size, floats)
    start_local(members, own, membership)
    members.until(lambda member: member.hello, "has not connected", settings.group_start_s)
    facts = facts_of(settings)
    for member in members.each.values():
        assert member.hello is not None
        if differs := difference(member.hello.facts, facts):
            members.expect_ends()
            refusal = f"{member}: {differs}; start all nodes with the same settings and model"
            with contextlib.suppress(GroupLost):
                members.send(Refusal(refusal))
            raise CannotStart(refusal)
        native = native and member.hello.can_native
    computing = sum(each.threads for each in own.values())
    welcome = Welcome(native, floats, SPIN_US if computing <= spare else 0.0, LIMIT_S)
    members.send(welcome)
    executor = build(own[0], membership.join(welcome))
    ours = facts_built(executor.info)
    members.until(lambda member: member.built, "has not loaded its part of the model", settings.group_start_s)
    for member in members.each.values():
        assert member.built is not None
        if differs := difference(member.built.facts, ours):
            raise CannotStart(f"{member}: {differs}; it loaded another model")
    members.complete = True
    structlog.get_logger().info("group formed", tp=layout.size, native=native)
    return executor, Lead(members, membership)
