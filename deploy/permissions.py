"""Who may publish and subscribe what on NATS, generated from the one subject table.

`shared/subjects.py` says who subscribes (its `Delivery`); here stands who publishes. A user of NATS is a
role, except workers: each instance has its own user, which reaches its own subjects only.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

from shared.subjects import EVERY_SERVICE_STATUS, TABLE, Delivery, Subject, service_status

Role = Literal["gateway", "scheduler", "worker", "kvstore", "operator"]

ROLES: tuple[Role, ...] = ("gateway", "scheduler", "worker", "kvstore", "operator")

PUBLISHERS: dict[str, tuple[Role, ...]] = {
    "SUBMIT": ("gateway", "operator"),
    "CANCEL": ("gateway", "operator"),
    "ACK": ("gateway", "operator"),
    "TOKENS": ("scheduler",),
    "STEP": ("scheduler",),
    "DONE": ("worker",),
    "RESYNC": ("worker",),
    "INSTANCE": ("scheduler", "operator"),
    "KV_EVENTS": ("worker", "kvstore"),
    "KV_RESTATE": ("kvstore",),
    "KV_TIER": ("kvstore",),
    "BEACON": ("scheduler",),
}
"""Row of the table → roles that send on it. The operator is also the internal client of the desk."""

SUBSCRIBERS: dict[Delivery, tuple[Role, ...]] = {
    Delivery.LEADER: ("scheduler",),
    Delivery.RANK_ZERO: ("worker",),
    Delivery.CLIENT: ("gateway",),
    Delivery.SCHEDULER: ("scheduler",),
    Delivery.QUEUE: ("kvstore",),
    Delivery.KVSTORE: ("kvstore",),
    Delivery.WORKERS: ("worker",),
    Delivery.ALL: ("gateway", "scheduler", "worker", "kvstore"),
}


ALSO_SUBSCRIBERS: dict[str, tuple[Role, ...]] = {"KV_RESTATE": ("kvstore",)}
"""Row of the table → further roles: kvstore speaks for its second tier as a worker does for its instance."""


def subscribes(role: Role, name: str) -> bool:
    """Whether a role receives what is sent on a row of the table."""
    return role in SUBSCRIBERS[TABLE[name].delivery] or role in ALSO_SUBSCRIBERS.get(name, ())


@dataclass(frozen=True)
class Permissions:
    """Subjects one NATS user may publish and subscribe."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(role: Role, user: str, instance: str = "") -> Permissions:
    """What `user` of `role` may do. A worker's subjects are narrowed to its `instance`.

    Everyone answers service discovery and has an inbox of its own; answers to requests go through the
    server's `allow_responses`. The operator may look at everything, and talk like a client.
    """

    def subject(row: Subject) -> str:
        if instance and "{instance}" in row.template:
            return row.template.replace("{instance}", instance).replace("{verb}", "*")
        return row.every().subject

    publish = [subject(row) for name, row in TABLE.items() if role in PUBLISHERS[name]]
    subscribe = [subject(row) for name, row in TABLE.items() if subscribes(role, name)]
    if role == "operator":
        publish += ["$SRV.>", EVERY_SERVICE_STATUS]
        subscribe = ["hortator.>"]
    else:
        # The endpoint that service discovery announces.
        status = service_status(f"hortator-{role}", instance or "any").split(".")
        subscribe.append(".".join([*status[:-1], instance or "*"]))
    return Permissions(tuple(publish), (*subscribe, "$SRV.>", f"_INBOX.{user}.>"))


def nats_user(role: Role, user: str, password: str, instance: str = "") -> dict[str, Any]:
    """The entry of a user in nats-server's `authorization`."""
    allowed = permissions(role, user, instance)
    return {
        "user": user,
        "password": password,
        "permissions": {
            "publish": {"allow": list(allowed.publish)},
            "subscribe": {"allow": list(allowed.subscribe)},
            "allow_responses": True,
        },
    }


def main(instances: list[str]) -> None:
    """Print a NATS `authorization` block for one's own server, passwords left to fill in."""
    users = [nats_user(role, role, "CHANGE ME") for role in ROLES if role != "worker"]
    users += [nats_user("worker", f"worker-{i}", "CHANGE ME", i) for i in instances]
    print("authorization { users:", json.dumps(users, indent=2), "}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["w0"])
