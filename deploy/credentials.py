"""Users of one run: a password for each, and what each may do, as the servers' configurations say it."""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from deploy.permissions import Role, nats_user

_MESH_KEYS = (
    "~hortator:* resetchannels -@all +@read +@write +@connection +@scripting +@transaction -@dangerous"
)

REDIS_RULES: dict[str, str] = {
    # Reading and writing the keys of the mesh, and nothing that reaches beyond them.
    "scheduler": _MESH_KEYS,
    "kvstore": _MESH_KEYS,
    # Enough to see that the server lives.
    "operator": "resetkeys resetchannels -@all +@connection +ping -@dangerous",
}
"""User of Redis → ACL rules. `+@write` holds FLUSHALL, which `-@dangerous` takes away again."""


@dataclass(frozen=True)
class User:
    role: Role
    name: str
    password: str = field(repr=False)
    instance: str = ""


@dataclass(frozen=True)
class Credentials:
    """Users of NATS and Redis by name."""

    nats: dict[str, User]
    redis: dict[str, str] = field(repr=False)

    def for_json(self) -> dict[str, dict[str, str]]:
        return {"nats": {u.name: u.password for u in self.nats.values()}, "redis": dict(self.redis)}


def generate(instances: Iterable[str]) -> Credentials:
    """New passwords for every service, the operator, and one worker user per instance."""
    roles: tuple[Role, ...] = ("gateway", "scheduler", "kvstore", "operator")
    users = [User(role, role, secrets.token_urlsafe(24)) for role in roles]
    users += [User("worker", f"worker-{i}", secrets.token_urlsafe(24), i) for i in instances]
    return Credentials(
        nats={user.name: user for user in users},
        redis={name: secrets.token_urlsafe(24) for name in REDIS_RULES},
    )


def nats_config(credentials: Credentials, port: int, name: str) -> str:
    """Configuration of nats-server, secrets included: keep it in a file only its user can read."""
    users = [nats_user(u.role, u.name, u.password, u.instance) for u in credentials.nats.values()]
    template = (Path(__file__).parent / "nats" / "nats.conf.tmpl").read_text()
    return Template(template).substitute(port=port, name=name, users=json.dumps(users, indent=2))


def redis_config(credentials: Credentials, port: int, folder: Path) -> str:
    """Configuration of redis-server or valkey-server, secrets included."""
    users = "\n".join(
        f"user {name} on >{credentials.redis[name]} {rules}" for name, rules in REDIS_RULES.items()
    )
    template = (Path(__file__).parent / "redis" / "redis.conf.tmpl").read_text()
    return Template(template).substitute(port=port, dir=folder, users=users)
