"""Each role of a mesh can do what it must on NATS and Redis, and is denied the rest, by the real servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
import pytest
import redis.exceptions
from nats.aio.client import Client
from redis.asyncio import Redis

from deploy.permissions import PUBLISHERS, subscribes
from shared.subjects import TABLE
from tests.support.servers import Servers, secured_servers

pytestmark = pytest.mark.servers

USERS = {"gateway": "gateway", "scheduler": "scheduler", "kvstore": "kvstore", "worker": "worker-w0"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with secured_servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


class Session:
    """A client that remembers what it was denied."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.denied: list[str] = []

    async def may_publish(self, subject: str) -> bool:
        await self.client.publish(subject, b"x")
        return await self._allowed()

    async def may_subscribe(self, subject: str) -> bool:
        subscription = await self.client.subscribe(subject)
        allowed = await self._allowed()
        if allowed:
            await subscription.unsubscribe()
        return allowed

    async def _allowed(self) -> bool:
        # The server answers in order; but the client's first ping may overtake what it has pending.
        before = len(self.denied)
        await self.client.flush()
        await self.client.flush()
        return len(self.denied) == before


@asynccontextmanager
async def session(servers: Servers, user: str) -> AsyncIterator[Session]:
    client = Client()
    opened = Session(client)

    async def on_error(error: Exception) -> None:
        opened.denied.append(str(error))

    await client.connect(
        servers.nats_url,
        user=user,
        password=servers.credentials.nats[user].password,
        inbox_prefix=f"_INBOX.{user}".encode(),
        error_cb=on_error,
        allow_reconnect=False,
    )
    try:
        yield opened
    finally:
        await client.close()


def concrete(template: str, instance: str = "w0") -> str:
    return template.format(model="m", client="c1", instance=instance, verb="claim")


@pytest.mark.parametrize("role", USERS)
async def test_a_role_publishes_exactly_the_rows_that_are_its_own(servers, role):
    async with session(servers, USERS[role]) as opened:
        for name, row in TABLE.items():
            expected = role in PUBLISHERS[name]
            assert await opened.may_publish(concrete(row.template)) is expected, name


@pytest.mark.parametrize("role", USERS)
async def test_a_role_subscribes_exactly_the_rows_it_receives(servers, role):
    async with session(servers, USERS[role]) as opened:
        for name, row in TABLE.items():
            expected = subscribes(role, name)
            assert await opened.may_subscribe(concrete(row.template)) is expected, name


async def test_an_instance_cannot_speak_or_listen_for_another(servers):
    async with session(servers, "worker-w0") as opened:
        for name in ("DONE", "RESYNC", "KV_EVENTS"):
            assert await opened.may_publish(concrete(TABLE[name].template)), name
            assert not await opened.may_publish(concrete(TABLE[name].template, "w1")), name
        for name in ("STEP", "INSTANCE", "KV_RESTATE"):
            assert await opened.may_subscribe(concrete(TABLE[name].template)), name
            assert not await opened.may_subscribe(concrete(TABLE[name].template, "w1")), name
            assert not await opened.may_subscribe(TABLE[name].every().subject), name


@pytest.mark.parametrize("user", ["gateway", "scheduler", "kvstore", "worker-w0"])
async def test_services_cannot_listen_to_everything_or_to_others_inboxes(servers, user):
    async with session(servers, user) as opened:
        for subject in (">", "hortator.>", "_INBOX.>", "_INBOX.operator.>", "$SYS.>"):
            assert not await opened.may_subscribe(subject), subject
        assert await opened.may_subscribe(f"_INBOX.{user}.abc")
        assert not await opened.may_publish("_INBOX.operator.abc")


async def test_the_operator_sees_all_frames_and_speaks_only_as_a_client(servers):
    async with session(servers, "operator") as opened:
        assert await opened.may_subscribe("hortator.>")
        for name in ("SUBMIT", "CANCEL", "ACK", "INSTANCE"):
            assert await opened.may_publish(concrete(TABLE[name].template)), name
        for name in ("STEP", "DONE", "TOKENS", "BEACON", "KV_EVENTS"):
            assert not await opened.may_publish(concrete(TABLE[name].template)), name


async def test_a_scheduler_asks_an_instance_and_gets_its_answer(servers):
    async with session(servers, "scheduler") as asks, session(servers, "worker-w0") as answers:

        async def answer(message):
            await message.respond(b"claimed")

        await answers.client.subscribe("hortator.v1.instance.w0.claim", cb=answer)
        await answers.client.flush()
        reply = await asks.client.request("hortator.v1.instance.w0.claim", b"", timeout=2)
        assert reply.data == b"claimed"
        assert answers.denied == []


@pytest.mark.parametrize("role", USERS)
async def test_every_service_announces_itself_to_the_operator(servers, role):
    import nats.micro

    from shared.subjects import service_status

    async with session(servers, USERS[role]) as announces, session(servers, "operator") as asks:

        async def status(request):
            await request.respond(b"{}")

        instance = "w0" if role == "worker" else role
        service = await nats.micro.add_service(announces.client, name=f"hortator-{role}", version="0.1.0")
        subject = service_status(f"hortator-{role}", instance)
        await service.add_endpoint(name="status", subject=subject, handler=status)
        await announces.client.flush()
        for question in (f"$SRV.STATS.hortator-{role}", "$SRV.PING", subject):
            assert (await asks.client.request(question, b"", timeout=2)).data
        assert announces.denied == []
        await service.stop()


async def assert_refused(servers: Servers, **who: str) -> None:
    client = Client()
    try:
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            await client.connect(servers.nats_url, allow_reconnect=False, **who)
    finally:
        await client.close()


async def test_a_wrong_password_is_refused(servers):
    await assert_refused(servers, user="gateway", password="guess")


async def test_nobody_enters_nats_without_credentials(servers):
    await assert_refused(servers)


@asynccontextmanager
async def redis_as(servers: Servers, user: str | None) -> AsyncIterator[Redis]:
    password = servers.credentials.redis.get(user) if user else None
    client = Redis(port=servers.redis_port, username=user, password=password)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.mark.parametrize("user", ["scheduler", "kvstore"])
async def test_a_service_reads_and_writes_the_keys_of_the_mesh(servers, user):
    async with redis_as(servers, user) as client:
        await client.set("hortator:test", "1", ex=10)
        assert await client.get("hortator:test") == b"1"
        assert await client.mget(["hortator:test", "hortator:none"]) == [b"1", None]
        await client.hset("hortator:hash", mapping={"a": 1})
        await client.expire("hortator:hash", 10)
        async with client.pipeline(transaction=True) as pipe:
            pipe.get("hortator:test")
            pipe.delete("hortator:test")
            assert await pipe.execute() == [b"1", 1]
        assert await client.eval("return redis.call('hget', KEYS[1], 'a')", 1, "hortator:hash") == b"1"


@pytest.mark.parametrize("user", ["scheduler", "kvstore"])
@pytest.mark.parametrize(
    "command",
    [
        ("GET", "somebody:elses"),
        ("SET", "somebody:elses", "1"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("DEBUG", "SLEEP", "0"),
        ("SUBSCRIBE", "x"),
        ("REPLICAOF", "NO", "ONE"),
        ("EVAL", "return redis.call('get', KEYS[1])", "1", "somebody:elses"),
    ],
    ids=" ".join,
)
async def test_a_service_is_denied_what_reaches_beyond_the_mesh(servers, user, command):
    async with redis_as(servers, user) as client:
        with pytest.raises(redis.exceptions.ResponseError):
            await client.execute_command(*command)


async def test_the_operator_may_only_ping_redis(servers):
    async with redis_as(servers, "operator") as client:
        assert await client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.get("hortator:test")


async def test_nobody_enters_redis_without_credentials(servers):
    async with redis_as(servers, None) as client:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await client.ping()
