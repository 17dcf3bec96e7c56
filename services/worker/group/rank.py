"""`python -m services.worker.group.rank`: a rank above 0, which computes what rank 0 tells it."""

import argparse
import contextlib
import gc
import os
import sys

import structlog

from services.worker.collective.port import GroupLost
from services.worker.compute import Compute
from services.worker.executors import UNSERVABLE, batch_for, build_executor, tier_for
from services.worker.group.channel import Channel, ChannelLost
from services.worker.group.facts import facts_built, facts_of, host_name
from services.worker.group.follower import Diverged, EndsWith, follow
from services.worker.group.layout import layout_of, spin_us
from services.worker.group.membership import LIMIT_S, can_native
from services.worker.group.messages import Built, Failed, Hello, Message, Part, Refusal
from services.worker.group.place import Place, handed, met
from services.worker.settings import WorkerSettings
from services.worker.step import AccountedExecutor
from shared.runtime import logs, process
from shared.runtime.settings import CannotStart, load


def main() -> None:
    arguments = _arguments()
    settings = load(WorkerSettings)
    logs.configure("worker", settings.instance, settings.log_level, rank=arguments.rank)
    process.die_with_parent(settings.parent_pid)
    try:
        if arguments.control is None:
            place = met(arguments.rank, settings)
        else:
            place = handed(arguments.rank, settings.tp, arguments.control, arguments.peers, arguments.memory)
    except CannotStart as error:
        structlog.get_logger().error("cannot start", error=str(error))
        raise SystemExit(1) from None
    raise SystemExit(serve(settings, place, arguments.formed))


def serve(settings: WorkerSettings, place: Place, formed: int | None) -> int:
    """A rank's whole life in its group, in which it is once it has written to `formed`.

    Returns the exit status.
    """
    log = structlog.get_logger()
    channel = place.channel
    ends = EndsWith(channel, place.membership.abort)
    try:
        _serve(settings, place, formed)
    except ChannelLost as error:
        log.info("rank 0 is gone", why=str(error))
    except GroupLost as error:
        log.error("group lost", why=str(error))
        _tell(channel, str(error))
    except Diverged as error:
        log.error("diverged", why=str(error))
        _tell(channel, str(error))
    except Refused as error:
        log.error("cannot start", error=str(error))
    except (CannotStart, ModuleNotFoundError) as error:
        log.error("cannot start", error=str(error))
        _tell(channel, str(error))
    except Exception as error:
        log.error("rank failed", exc_info=error)
        _tell(channel, f"{type(error).__name__}: {error}")
    else:
        ends.expected()
        return 0
    finally:
        # Not before rank 0 knows why: that it is missed in a collective says less.
        place.membership.close()
    return 1


class Refused(CannotStart):
    """Rank 0 does not take this rank."""


def _serve(settings: WorkerSettings, place: Place, formed: int | None) -> None:
    membership, channel = place.membership, place.channel
    hello = Hello(
        rank=membership.rank,
        node=settings.node_rank,
        host=host_name(),
        pid=os.getpid(),
        facts=facts_of(settings),
        can_native=can_native(),
        data_port=place.data_port,
    )
    channel.send(hello)
    welcome = channel.receive()
    if isinstance(welcome, Refusal):
        raise Refused(welcome.reason)
    place.complete(welcome, settings)
    looking_us = spin_us(settings, layout_of(settings))
    collective = membership.join(welcome, looking_us, settings.group_start_s)
    try:
        executor = build_executor(settings, collective)
    except UNSERVABLE as error:
        raise CannotStart(str(error)) from error
    batch = batch_for(settings, executor.info)
    try:
        tier = tier_for(settings, executor, membership.rank)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    if tier is not None:
        tier.when(lambda key, count, us: _say(channel, Part(*key, count, us)), lambda: None)
    compute = Compute(executor, batch, tier=tier)
    membership.hurry(LIMIT_S)
    memory = executor.memory() if isinstance(executor, AccountedExecutor) else {}
    channel.send(Built(facts_built(executor.info), memory))
    if formed is not None:
        os.write(formed, b"1")
        os.close(formed)
    structlog.get_logger().info("rank follows", **dict(executor.info.detail))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    follow(compute, channel)
    compute.close()


def _tell(channel: Channel, reason: str) -> None:
    _say(channel, Failed(reason))


def _say(channel: Channel, message: Message) -> None:
    """To rank 0, if it is still there; whoever follows notices if not."""
    with contextlib.suppress(ChannelLost):
        channel.send(message)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A rank of a group, started by its worker, whose settings it reads. Descriptors are what "
        "it was handed; without `--control` it goes to the rendezvous."
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--control", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--formed", type=int)
    parser.add_argument("--peers", type=_peers, default=[])
    return parser.parse_args(sys.argv[1:])


def _peers(text: str) -> list[tuple[int, int]]:
    """`RANK:DESCRIPTOR,…`"""
    return [(int(rank), int(fd)) for rank, _, fd in (pair.partition(":") for pair in text.split(",") if pair)]


if __name__ == "__main__":
    main()
