"""The life of a service process: start, announce, work, and one written order of shutting down."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import structlog
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.bus.nats import NatsBus
from shared.runtime import logs, process
from shared.runtime.http import App, Health, HttpServer, ops_app
from shared.runtime.settings import PREFIX, CannotStart, ServiceSettings
from shared.store.port import Store
from shared.store.redis import RedisStore


@dataclass
class ServiceContext:
    """What `main` of a service gets. `stats` and `http_app` are for `main` to set."""

    name: str
    settings: Any
    bus: NatsBus
    store: Store | None
    """None when `redis_url` is empty. Its calls raise `StoreDown` while Redis is away."""
    log: Any
    metrics: CollectorRegistry
    health: Health
    ops_app: App
    """Answers /health and /metrics; a service with an app of its own passes these on to it."""
    http_address: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM, SIGINT, or when the broker refuses us for good: finish and return from `main`."""
    stats: Callable[[], dict[str, Any]] = dict
    """Data of `$SRV.STATS`; called for each such request."""
    http_app: App | None = None
    """ASGI app that takes every request instead of `ops_app` once set (no lifespan events)."""

    def set_health(self, ok: bool, detail: dict[str, Any] | None = None) -> None:
        """What `/health` tells; a service that is stopping is never well."""
        self.health.ok = ok and not self.stopping.is_set()
        self.health.detail = detail or {}


Main = Callable[[ServiceContext], Awaitable[None]]


def entry(name: str, main: Callable[[], None]) -> None:
    """`main` of service `name` as a program: what a person can mend ends it with one `cannot start` line."""
    try:
        main()
    except CannotStart as error:
        logs.configure(name, os.environ.get(f"{PREFIX}INSTANCE", ""))
        _refuse(structlog.get_logger(), error)
        raise SystemExit(1) from None


def _refuse(log: Any, error: BaseException) -> None:
    log.error("cannot start", error=str(error))
    # Whoever doubts that it is their doing finds the place with HORTATOR_LOG_LEVEL=debug.
    log.debug("where it was found", exc_info=error)


def run(settings: ServiceSettings, name: str, main: Main) -> None:
    """Run service `name` (gateway, scheduler, worker, kvstore) until it is told to stop.

    Raises SystemExit(1) when `main` failed or had to be cancelled, the broker cannot be reached, or it
    refused us for good. A `CannotStart` of `main` is logged without a traceback.
    """
    logs.configure(name, settings.instance, settings.log_level)
    if settings.parent_pid:
        process.die_with_parent(settings.parent_pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_live(settings, name, main))
    if code:
        raise SystemExit(code)


async def _live(settings: ServiceSettings, name: str, main: Main) -> int:
    log = structlog.get_logger()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    health = Health(name, settings.instance)
    stopping = asyncio.Event()

    def stop(reason: str) -> None:
        log.info("stopping", reason=reason)
        # Said before the work ends, so that nobody is sent here meanwhile.
        health.ok, health.detail = False, {"state": "stopping"}
        stopping.set()

    process.on_stop_signals(asyncio.get_running_loop(), stop, settings.stop_grace_s + 5)
    async with contextlib.AsyncExitStack() as closing:
        try:
            bus = await NatsBus.connect(
                settings.nats_url,
                name=f"{name}/{settings.instance}",
                user=settings.nats_user,
                password=settings.nats_password,
            )
            closing.push_async_callback(bus.close)
            redis_url = "" if "redis_url" in settings.unused else settings.redis_url
            store = RedisStore(redis_url) if redis_url else None
            if store is not None:
                closing.push_async_callback(store.close)
            context = ServiceContext(
                name,
                settings,
                bus,
                store,
                log,
                registry,
                health,
                ops_app(health, registry),
                stopping=stopping,
            )
            registry.register(_BusMetrics(bus))

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await (context.http_app or context.ops_app)(scope, receive, send)

            server = HttpServer(app, settings.http)
            await server.start()
            closing.push_async_callback(server.stop)
        except (OSError, ValueError) as error:
            _refuse(log, error)
            return 1
        context.http_address = server.address
        announced = await bus.announce(
            f"hortator-{name}", settings.instance, metadata.version("hortator"), lambda: context.stats()
        )
        if settings.ready_file:
            process.write_ready_file(settings.ready_file, server.address)
        log.info("started", http=server.address, pid=os.getpid())
        watch = asyncio.get_running_loop().create_task(_stop_when_lost(bus, stop))
        try:
            return await _work(main, context)
        finally:
            # Refuse is main's part (it has returned); then unregister, finish open answers, close.
            watch.cancel()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(announced.stop(), 2)
            log.info("stopped")


async def _work(main: Main, context: ServiceContext) -> int:
    """`main` to its end; cancelled when it outlives the grace time after `stopping`."""
    task = asyncio.ensure_future(main(context))
    stopping = asyncio.ensure_future(context.stopping.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    late = False
    if not task.done():
        await asyncio.wait({task}, timeout=context.settings.stop_grace_s)
        late = not task.done()
        if late:
            context.log.error(
                "not finished within stop_grace_s, cancelling", grace_s=context.settings.stop_grace_s
            )
            task.cancel()
            await asyncio.wait({task}, timeout=2)
    stopping.cancel()
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        if isinstance(error, CannotStart):
            _refuse(context.log, error)
        else:
            context.log.error("service failed", exc_info=error)
        return 1
    return 1 if late or context.bus.lost.is_set() else 0


async def _stop_when_lost(bus: NatsBus, stop: Callable[[str], None]) -> None:
    await bus.lost.wait()
    stop("the broker ended our session for good")


class _BusMetrics(Collector):
    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    def collect(self) -> Iterable[Any]:
        up = GaugeMetricFamily("hortator_bus_connected", "1 while there is a session with NATS")
        up.add_metric([], float(self._bus.connected))
        yield up
        errors = CounterMetricFamily(
            "hortator_bus_errors", "Frames dropped, denied or failed, by kind", labels=["kind"]
        )
        for kind, count in self._bus.counters.by_kind.items():
            errors.add_metric([kind], count)
        yield errors
