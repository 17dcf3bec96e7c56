"""Settings of a scheduler process, and the rules of the core made from them."""

from dataclasses import dataclass
from typing import Literal

from services.scheduler.admission import ExpectedOutput, Reservation, ReserveMax, ReserveNothing
from services.scheduler.budget import BudgetRules
from services.scheduler.core import Rules
from services.scheduler.desk import DeskRules
from services.scheduler.placement import FirstTokenSoonest, LeastLoad, Placement, RoundRobin
from services.scheduler.policy import BatchPolicy, ContinuousPolicy, StaticBatchPolicy
from services.scheduler.preempt import LastCome, LeastHarm, Preemption
from shared.runtime.settings import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(ServiceSettings):
    """One scheduler; several of the same model make a leader and its standbys."""

    policy: Literal["continuous", "static"] = "continuous"
    """Who may join a running batch; `static` exists for comparison only."""
    reservation: Literal["expected", "max", "nothing"] = "expected"
    """Blocks set aside at admission: for the output expected, or (for comparison) for max_tokens or none."""
    placement: Literal["ttft", "round-robin", "least-load"] = "ttft"
    """Which instance a request goes to: by predicted time to first token, or (for comparison) in turn, or to
    the one with the fewest sequences."""
    preemption: Literal["least-harm", "last-come"] = "least-harm"
    """Who is sent back to the queue when blocks run out; `last-come` exists for comparison only."""
    itl_target_ms: float = 250.0
    """Longest gap between tokens that prompts may cause to running sequences."""
    max_step_ms: float = 500.0
    """No step is planned longer than this."""
    max_running: int = 0
    """Sequences per instance at once; 0: as many as it has slots."""
    queue_bound: int = 1024
    """Waiting sequences at most; further requests are refused with a time to try again."""


def make_rules(settings: SchedulerSettings) -> Rules:
    """The core's numbers."""
    return Rules(
        model=settings.model,
        budget=BudgetRules(
            itl_target_s=settings.itl_target_ms / 1000, step_cap_s=settings.max_step_ms / 1000
        ),
        desk=DeskRules(queue_bound=settings.queue_bound),
        max_running=settings.max_running,
    )


def make_policy(settings: SchedulerSettings) -> BatchPolicy:
    """By name."""
    return StaticBatchPolicy() if settings.policy == "static" else ContinuousPolicy()


RESERVATIONS: dict[str, type[Reservation]] = {
    "expected": ExpectedOutput,
    "max": ReserveMax,
    "nothing": ReserveNothing,
}


def make_reservation(settings: SchedulerSettings) -> Reservation:
    """By name."""
    return RESERVATIONS[settings.reservation]()


def make_preemption(settings: SchedulerSettings) -> Preemption:
    """By name."""
    return LastCome() if settings.preemption == "last-come" else LeastHarm()


PLACEMENTS: dict[str, type[Placement]] = {
    "ttft": FirstTokenSoonest,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
}


def make_placement(settings: SchedulerSettings) -> Placement:
    """By name."""
    return PLACEMENTS[settings.placement]()
