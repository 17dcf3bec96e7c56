"""How rank 0 forms its group: it starts the ranks of its node, meets the others, and sees that all agree."""

import os
from collections.abc import Callable, Mapping

import structlog

from services.worker.collective.native import make_memory
from services.worker.collective.port import Collective, GroupLost
from services.worker.group.facts import difference, facts_built, facts_of
from services.worker.group.layout import Layout, cores_here, layout_of, rank_settings, spin_us
from services.worker.group.lead import Lead
from services.worker.group.local import start_local, start_rank
from services.worker.group.machine import cpus_here
from services.worker.group.meeting import Meeting
from services.worker.group.members import Members
from services.worker.group.membership import (
    LIMIT_S,
    Membership,
    can_native,
    most_floats,
)
from services.worker.group.messages import Refusal, Welcome
from services.worker.parallel.topology import straddle
from services.worker.settings import WorkerSettings
from services.worker.step import Executor
from shared.runtime.settings import CannotStart

Build = Callable[[WorkerSettings, Collective], Executor]


def lead(settings: WorkerSettings, build: Build) -> tuple[Executor, Lead]:
    """Form the group of which this process is rank 0, and build what it computes with.

    Raises `CannotStart` with what keeps the group from forming, and what `build` raises.
    """
    layout = layout_of(settings)
    if not hasattr(os, "pidfd_open"):
        raise CannotStart(f"tp={layout.size} needs Linux, whose pidfds tell how a rank ends")
    membership = Membership(0, layout.size)
    members = Members({rank: layout.node_of(rank) for rank in range(1, layout.size)}, membership.abort)
    formed = False
    try:
        executor = _form(settings, layout, members, membership, build)
        formed = True
    except GroupLost as error:
        raise CannotStart(str(members.explained(error))) from error
    except TimeoutError as error:
        raise CannotStart(str(error)) from error
    finally:
        if not formed:
            members.close(0.0)
            membership.close()
    return executor, Lead(members, membership)


def _form(
    settings: WorkerSettings, layout: Layout, members: Members, membership: Membership, build: Build
) -> Executor:
    spare = len(cores_here(settings))
    cpus = cpus_here()
    own = {rank: rank_settings(settings, layout, rank, spare, cpus) for rank in layout.ranks_of(0)}
    floats = most_floats(settings)
    if layout.nodes == 1:
        welcome = _of_one_node(settings, members, membership, own, floats)
    else:
        welcome = _of_several(settings, layout, members, membership, own, floats)
    executor = build(own[0], membership.join(welcome, spin_us(own[0], layout), settings.group_start_s))
    ours = facts_built(executor.info)
    members.until(lambda member: member.built, "has not loaded its part of the model", settings.group_start_s)
    for member in members.each.values():
        assert member.built is not None
        if differs := difference(member.built.facts, ours):
            why = f"{member}: {differs}; it loaded another model"
            members.tell_all(Refusal(why))
            raise CannotStart(why)
    membership.hurry(LIMIT_S)
    if membership.links is not None and (across := straddle(range(layout.size), membership.links)):
        structlog.get_logger().warning("the group straddles domains", why=across.describe())
    structlog.get_logger().info("group formed", tp=layout.size, nodes=layout.nodes, native=welcome.native)
    return executor


def _of_one_node(
    settings: WorkerSettings,
    members: Members,
    membership: Membership,
    own: Mapping[int, WorkerSettings],
    floats: int,
) -> Welcome:
    native = can_native()
    if native:
        membership.memory_fd = make_memory(membership.size, floats)
    start_local(members, own, membership)
    members.until(lambda member: member.hello, "has not started", settings.group_start_s)
    welcome = Welcome(native, floats)
    members.welcome(welcome)
    return welcome


def _of_several(
    settings: WorkerSettings,
    layout: Layout,
    members: Members,
    membership: Membership,
    own: Mapping[int, WorkerSettings],
    floats: int,
) -> Welcome:
    native = can_native()
    with Meeting(settings, layout, members, facts_of(settings)) as meeting:
        for rank in range(1, len(own)):
            members.started(rank, start_rank(own[rank], ["--rank", str(rank)]))
        try:
            members.until(lambda member: member.hello, meeting.missing(), settings.group_start_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}{meeting.last_refused()}") from None
        native = native and all(member.hello and member.hello.can_native for member in members.each.values())
        welcome = Welcome(native, floats, meeting.addresses())
        members.welcome(welcome)
        membership.peers |= meeting.peers.connected([], settings.group_secret, settings.group_start_s)
    return welcome
