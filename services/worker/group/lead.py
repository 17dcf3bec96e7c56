"""Rank 0's side of a formed group: it passes on what it computes, and is told when a rank is lost."""

import os
from collections.abc import Callable
from typing import Any

from services.worker.collective.port import GroupLost
from services.worker.group.members import Members
from services.worker.group.membership import Membership
from services.worker.group.messages import Begin, Close, EndFetch, Follow, Measure, Tiers, Tune
from services.worker.parallel.topology import describe
from services.worker.tier.arrivals import Key
from services.worker.tier.homes import TierState
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

    def use_tiers(self, state: TierState) -> None:
        self._members.send(Tiers(list(state.offers), state.home, state.wanted))

    def end_fetch(self, key: Key, count: int) -> None:
        self._members.send(EndFetch(*key, count))

    def when_fetched(self, then: Callable[[int, Key, int, int], None]) -> None:
        self._members.when_fetched(then)

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
        links = self._membership.links
        return {"ranks": ", ".join(pids)} | ({} if links is None else {"links": describe(links)})

    def memory(self) -> list[dict[str, Any]]:
        return [member.built.memory for member in self._members.each.values() if member.built is not None]

    def close(self) -> None:
        """Idempotent; the ranks have ended when it returns."""
        self._members.expect_ends()
        self._members.tell_all(Close())
        self._members.close(CLOSE_S)
        self._membership.close()
