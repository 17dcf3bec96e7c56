"""What a run asks for: prompts, lengths and arrival times, all from a seed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

WORDS = (
    "time",
    "river",
    "stone",
    "light",
    "cloud",
    "seven",
    "garden",
    "music",
    "iron",
    "paper",
    "north",
    "apple",
)


@dataclass(frozen=True)
class Job:
    """One request to make. `at` is seconds after the run's start; closed loops ignore it."""

    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Lengths of random prompts, in tokens, and the half-open range ids are drawn from."""

    prompt_tokens: int = 256
    output_tokens: int = 64
    shared_prefix: int = 0
    id_low: int = 1000
    id_high: int = 40000
    text: bool = False
    """Send words instead of ids, for servers that take no ids; lengths are then approximate."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix <= self.prompt_tokens:
            raise ValueError(
                f"a shared prefix of {self.shared_prefix} does not fit {self.prompt_tokens} prompt tokens"
            )
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.id_low < self.id_high:
            raise ValueError("prompt and output need at least one token, and the id range must not be empty")


def random_ids(rng: Random, count: int, shape: Shape) -> list[int]:
    return [rng.randrange(shape.id_low, shape.id_high) for _ in range(count)]


def random_jobs(count: int, shape: Shape, seed: str) -> list[Job]:
    """`count` jobs with the same lengths; all share their first `shared_prefix` ids."""
    rng = Random(seed)
    shared = random_ids(rng, shape.shared_prefix, shape)
    jobs = []
    for _ in range(count):
        ids = shared + random_ids(rng, shape.prompt_tokens - shape.shared_prefix, shape)
        prompt: list[int] | str = " ".join(WORDS[i % len(WORDS)] for i in ids) if shape.text else ids
        jobs.append(Job(prompt, shape.prompt_tokens, shape.output_tokens))
    return jobs


def poisson(jobs: Sequence[Job], rate: float, seed: str) -> list[Job]:
    """The jobs with arrival times of a Poisson process of `rate` requests a second."""
    if rate <= 0:
        raise ValueError(f"the rate must be above 0 requests a second, not {rate}")
    rng = Random(f"{seed}:arrivals")
    at, timed = 0.0, []
    for job in jobs:
        at += rng.expovariate(rate)
        timed.append(Job(job.prompt, job.prompt_tokens, job.output_tokens, at))
    return timed
