"""Who leads: the fencing order and the states FOLLOWER → CLAIMING → LEADER → FOLLOWER (protocol §1, §2)."""

from dataclasses import dataclass
from enum import Enum

from shared.ids import MAX_EPOCH


class Rule(Enum):
    """docs/protocol.md §2."""

    FOLLOWER = "follower"
    CLAIMING = "claiming"
    LEADER = "leader"


def outranks(epoch: int, owner: str, other_epoch: int, other_owner: str) -> bool:
    """Whether (epoch, owner) fences (other_epoch, other_owner): higher epoch, then *smaller* owner."""
    return epoch > other_epoch or (epoch == other_epoch and owner < other_owner)


def owner_name(model: str, instance: str, life: str) -> str:
    """The owner id of one life of a scheduler process. It begins with the model, so that a frame that names
    only an owner still says whose mesh it is of."""
    return f"{model}/{instance}-{life}"


def leads_model(owner: str, model: str) -> bool:
    """Whether that owner is a scheduler of this model."""
    return owner.startswith(f"{model}/")


@dataclass(frozen=True)
class LeadershipTimes:
    """Seconds."""

    beacon_s: float = 0.5
    beacon_ttl_s: float = 1.5
    lease_ttl_s: float = 2.0
    claim_timeout_s: float = 1.0
    pause_limit_s: float = 1.0
    settle_s: float = 0.25
    """After its own pause a leader listens this long before it sends anything but a beacon."""


class Leadership:
    """One process's view of who leads. Nothing in here sends anything."""

    def __init__(self, owner: str, times: LeadershipTimes, now: float) -> None:
        self.owner = owner
        self.times = times
        self.rule = Rule.FOLLOWER
        self.epoch = 0
        """Of our own latest claim."""
        self.top_epoch = 0
        self.top_owner = ""
        """Highest (epoch, owner) heard of from anywhere."""
        self._quiet_since = now
        """Since when no other leader's beacon was heard: our start, or the last one."""
        self._lease_until = now
        self.claiming_since = now
        self.last_tick = now
        self.listening_until = 0.0

    def heard(self, epoch: int, owner: str) -> bool:
        """Note a leadership seen in any frame; True if it fences ours."""
        if epoch > MAX_EPOCH:
            return False
        if owner and (not self.top_owner or outranks(epoch, owner, self.top_epoch, self.top_owner)):
            self.top_epoch, self.top_owner = epoch, owner
        return self.rule is not Rule.FOLLOWER and self.fences_us(epoch, owner)

    def fences_us(self, epoch: int, owner: str) -> bool:
        """G3: whether that leadership ends ours."""
        return bool(owner) and owner != self.owner and outranks(epoch, owner, self.epoch, self.owner)

    def heard_beacon(self, epoch: int, owner: str, now: float) -> bool:
        """As `heard`; the other leader is alive unless it is one that we fence."""
        if owner != self.owner and not (
            self.rule is not Rule.FOLLOWER and outranks(self.epoch, self.owner, epoch, owner)
        ):
            self._quiet_since = now
        return self.heard(epoch, owner)

    def heard_lease(self, epoch: int, owner: str, ttl_s: float, now: float) -> bool:
        """Redis shows a lease; `ttl_s` 0: only its epoch is remembered."""
        if owner != self.owner:
            self._lease_until = now + ttl_s
        self.top_epoch = max(self.top_epoch, epoch)
        return self.heard(epoch, owner) if ttl_s > 0 else False

    def lease_unknown(self, now: float) -> None:
        """Redis cannot be asked: it neither helps nor hinders."""
        self._lease_until = min(self._lease_until, now)

    def silence_forgiven(self, now: float) -> None:
        """We were deaf (disconnected, stopped): start listening anew."""
        self._quiet_since = now

    def may_claim(self, now: float) -> bool:
        """G1: beacons were silent for their time to live, and no live lease is known."""
        return now - self._quiet_since > self.times.beacon_ttl_s and now > self._lease_until

    def next_epoch(self) -> int:
        """G2: above everything heard of, whatever Redis has forgotten."""
        return 1 + max(self.top_epoch, self.epoch)

    def claim(self, now: float) -> None:
        """Begin a claim under a fresh epoch."""
        self.epoch = self.next_epoch()
        self.rule = Rule.CLAIMING
        self.claiming_since = now
        self.heard(self.epoch, self.owner)

    def lead(self) -> None:
        """The claim went through."""
        self.rule = Rule.LEADER

    def follow(self, now: float) -> None:
        """Ours is over; listen for a beacon's time to live before the next claim."""
        self.rule = Rule.FOLLOWER
        self._quiet_since = now

    def woke(self, now: float) -> bool:
        """G4: whether we were stopped for longer than the limit: then the silence was our own."""
        return now - self.last_tick > self.times.pause_limit_s
