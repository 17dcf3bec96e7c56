"""What is kept of each request, and the figures made from it.

Definitions (the same as in every table, JSON file and plot):

- time to first token: from the moment the request was due (open loop) or sent (closed loop) to the first
  event that carries choices;
- gap: time between two successive events with choices of one request (an event may carry several tokens);
- end to end: from the same start to the last event with choices;
- tokens: what the server's usage says, else the number of events with choices;
- a request counts as failed if its status is not 200, its stream breaks or carries an error, or it ends with
  another number of tokens than was asked for under ignore_eos. It counts as an error and in no other figure;
- percentile p of n values: the value at position min(n - 1, floor(n * p)) of the sorted list;
- tokens/s and requests/s: of successful requests, over the wall time from the first start to the last end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Record:
    """One request. Times are seconds since the run began."""

    start: float
    """When it was due (open loop) or sent (closed loop)."""
    prompt_tokens: int
    wanted_tokens: int
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        return (self.first or 0.0) - self.start

    @property
    def e2e(self) -> float:
        return (self.last or 0.0) - self.start


@dataclass(frozen=True)
class Summary:
    """Figures of a run; times in milliseconds, NaN where nothing was measured."""

    requests: int
    errors: int
    wall_s: float
    output_tok_s: float
    request_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    cached_share: float
    """Prompt tokens the server took from its prefix cache, by its usage, over all prompt tokens."""
    late_max_ms: float
    """How late the generator itself sent a request at worst; large values make an open-loop run doubtful."""


def percentile(values: Iterable[float], p: float) -> float:
    """The value at position min(n - 1, floor(n * p)) of the sorted list; NaN for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p))] if ordered else float("nan")


def summarise(records: Sequence[Record], wall_s: float) -> Summary:
    """Figures of the records of one run, or of several runs whose wall times are added up."""
    good = [r for r in records if not r.error]
    ttft = [r.ttft for r in good if r.first is not None]
    gaps = [gap for r in good for gap in r.gaps]
    e2e = [r.e2e for r in good if r.last is not None]
    prompt = sum(r.prompt_tokens for r in good)

    def ms(values: list[float], p: float) -> float:
        return 1e3 * percentile(values, p)

    return Summary(
        requests=len(records),
        errors=len(records) - len(good),
        wall_s=wall_s,
        output_tok_s=sum(r.tokens for r in good) / wall_s if wall_s else 0.0,
        request_s=len(good) / wall_s if wall_s else 0.0,
        ttft_p50_ms=ms(ttft, 0.5),
        ttft_p90_ms=ms(ttft, 0.9),
        ttft_p99_ms=ms(ttft, 0.99),
        gap_p50_ms=ms(gaps, 0.5),
        gap_p99_ms=ms(gaps, 0.99),
        gap_max_ms=1e3 * max(gaps, default=float("nan")),
        e2e_p50_ms=ms(e2e, 0.5),
        e2e_p99_ms=ms(e2e, 0.99),
        cached_share=sum(r.cached_tokens for r in good) / prompt if prompt else 0.0,
        late_max_ms=1e3 * max((r.sent - r.start for r in records), default=0.0),
    )
