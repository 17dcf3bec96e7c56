"""The one table of NATS subjects: template, message type, who may subscribe (design §4)."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from hashlib import sha256
from typing import Any

from shared.wire import (
    Ack,
    Beacon,
    Beat,
    Cancel,
    Claimed,
    Codec,
    Done,
    FromInstance,
    KvEvents,
    Restate,
    Step,
    Submit,
    TierOffer,
    ToInstance,
    Tokens,
)

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class Delivery(Enum):
    """Who subscribes; part of a subject's type."""

    LEADER = "the leading scheduler only"
    RANK_ZERO = "exactly one: rank 0 of the instance"
    CLIENT = "exactly one: the client named in the subject"
    SCHEDULER = "the leading scheduler, for instances it owns"
    QUEUE = "one member of the service's queue group"
    KVSTORE = "every kvstore process; one of them writes"
    WORKERS = "rank 0 of every instance"
    ALL = "everyone who cares"


@dataclass(frozen=True)
class Address:
    """A concrete subject together with the codec of what it carries."""

    subject: str
    codec: Codec


@dataclass(frozen=True)
class Subject:
    """A row of the table. `reply` is the type of the answer where the subject is a request."""

    template: str
    carries: Any
    delivery: Delivery
    reply: Any = None

    @cached_property
    def codec(self) -> Codec:
        return Codec(self.carries)

    @cached_property
    def reply_codec(self) -> Codec:
        return Codec(self.reply)

    def at(self, **tokens: str) -> Address:
        """The subject for these tokens. Raises ValueError for anything that is not a plain token."""
        for name, token in tokens.items():
            if not _TOKEN.match(token):
                raise ValueError(
                    f"{name}={token!r} cannot be part of a subject: use [A-Za-z0-9_-], 1 to 64 characters"
                )
        return Address(self.template.format(**tokens), self.codec)

    def every(self) -> Address:
        """The wildcard subscription over all values of its tokens."""
        return Address(re.sub(r"\{\w+\}", "*", self.template), self.codec)


def subject_token(name: str) -> str:
    """A model or instance name made fit for a subject: other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64] or "-"


TIER = "tier-"
"""How rows of second tiers in the prefix index begin; no instance may be called so."""


def tier_row(kvstore: str, model: str) -> str:
    """Row in the prefix index of the blocks of `model` in the second tier of that kvstore, which speaks for
    it on `KV_EVENTS` as an instance does for itself."""
    return f"{TIER}{subject_token(kvstore)[:40]}-{sha256(model.encode()).hexdigest()[:8]}"


def service_status(service: str, instance: str) -> str:
    """Endpoint of a service in the NATS micro convention (`$SRV.INFO`); answers its stats data as JSON."""
    return f"hortator.v1.service.{subject_token(service)}.{subject_token(instance)}"


EVERY_SERVICE_STATUS = "hortator.v1.service.*.*"
"""Wildcard over `service_status`, for whoever may ask any service."""

SUBMIT = Subject("hortator.v1.submit.{model}", Submit, Delivery.LEADER)
CANCEL = Subject("hortator.v1.cancel.{model}", Cancel, Delivery.LEADER)
TOKENS = Subject("hortator.v1.tokens.{client}", Tokens, Delivery.CLIENT)
ACK = Subject("hortator.v1.ack.{client}", Ack, Delivery.LEADER)
STEP = Subject("hortator.v1.step.{instance}", Step, Delivery.RANK_ZERO)
DONE = Subject("hortator.v1.done.{instance}", Done, Delivery.SCHEDULER)
RESYNC = Subject("hortator.v1.resync.{instance}", FromInstance, Delivery.SCHEDULER)
INSTANCE = Subject(
    "hortator.v1.instance.{instance}.{verb}", ToInstance, Delivery.RANK_ZERO, reply=Claimed | Beat
)
KV_EVENTS = Subject("hortator.v1.kv.events.{instance}", KvEvents, Delivery.KVSTORE)
KV_RESTATE = Subject("hortator.v1.kv.restate.{instance}", Restate, Delivery.RANK_ZERO)
KV_TIER = Subject("hortator.v1.kv.tier", TierOffer, Delivery.WORKERS)
BEACON = Subject("hortator.v1.scheduler.beacon", Beacon, Delivery.ALL)

TABLE = {name: row for name, row in list(globals().items()) if isinstance(row, Subject)}
"""Every subject by its name: documentation, permissions and `hortator tap` are made from it."""
