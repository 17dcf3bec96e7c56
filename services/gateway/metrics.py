"""What the gateway measures of requests: families as vLLM has them, observed once per request or choice.

Observing is a list index and an addition here; prometheus_client's own objects take a lock each time, which
adds up over a dozen observations a request. They are made only when somebody reads `/metrics`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from shared.wire import SeqTimes

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160, 640)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LABELS = ["model_name"]


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"hortator_{self._name}", self._text, labels=_LABELS)
        buckets, total = [], 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        family.add_metric([model], buckets, self._sum)
        return family


class GatewayMetrics(Collector):
    """Registered in `registry` under `hortator_*`. `open_requests` tells (running, waiting) when asked."""

    def __init__(
        self, registry: CollectorRegistry, model: str, open_requests: Callable[[], tuple[int, int]]
    ) -> None:
        self._model = model
        self._open_requests = open_requests
        self._ttft = _Histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._gap = _Histogram("inter_token_latency_seconds", "Mean time between a choice's tokens", _GAPS)
        self._e2e = _Histogram("e2e_request_latency_seconds", "From request to last byte", _SECONDS)
        self._prompt = _Histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output = _Histogram("request_generation_tokens", "Output tokens of a choice", _TOKENS)
        self._queue = _Histogram("request_queue_time_seconds", "Waiting for a slot", _SECONDS)
        self._prefill = _Histogram("request_prefill_time_seconds", "Computing the prompt", _SECONDS)
        self._decode = _Histogram("request_decode_time_seconds", "Producing tokens", _SECONDS)
        self._preempted = _Histogram("request_preempted_time_seconds", "Set aside for others", _SECONDS)
        self._recomputed = _Histogram("request_recomputed_time_seconds", "Computed again", _SECONDS)
        self._stalled = _Histogram("request_stalled_time_seconds", "Held up by a failure", _SECONDS)
        self._prompt_total = 0
        self._output_total = 0
        self._success: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        registry.register(self)

    def began(self, prompt_tokens: int) -> None:
        self._prompt.observe(prompt_tokens)
        self._prompt_total += prompt_tokens

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def choice_ended(self, tokens: int, seconds: float, reason: str) -> None:
        """`seconds` from the first token to the last."""
        self._output.observe(tokens)
        self._output_total += tokens
        if tokens > 1:
            self._gap.observe(seconds / (tokens - 1))
        self._success[reason] += 1

    def times(self, times: SeqTimes) -> None:
        """Where a choice's time went at the scheduler; what only troubled ones have, only for those."""
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._decode.observe(times.decode_s)
        if times.preempted_s or times.recomputed_s or times.stalled_s:
            self._preempted.observe(times.preempted_s)
            self._recomputed.observe(times.recomputed_s)
            self._stalled.observe(times.stalled_s)

    def ended(self, outcome: str, seconds: float) -> None:
        self._e2e.observe(seconds)
        self._outcomes[outcome] += 1

    def http_error(self, status: int, code: str | None) -> None:
        self._errors[str(status), code or ""] += 1

    def collect(self) -> Iterable[Any]:
        model = self._model
        running, waiting = self._open_requests()
        yield _gauge("num_requests_running", "Requests that have got a first token", model, running)
        yield _gauge("num_requests_waiting", "Requests without a token yet", model, waiting)
        yield _counter("prompt_tokens", "Prompt tokens in all", _LABELS, {(model,): self._prompt_total})
        yield _counter("generation_tokens", "Output tokens in all", _LABELS, {(model,): self._output_total})
        success = {(model, reason): count for reason, count in self._success.items()}
        yield _counter("request_success", "Choices that ended well", [*_LABELS, "finished_reason"], success)
        outcomes = {(model, outcome): count for outcome, count in self._outcomes.items()}
        yield _counter("requests", "Requests by outcome", [*_LABELS, "outcome"], outcomes)
        yield _counter("http_errors", "Answers with an error status", ["status", "code"], self._errors)
        for family in vars(self).values():
            if isinstance(family, _Histogram):
                yield family.family(model)


def _gauge(name: str, text: str, model: str, value: int) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"hortator_{name}", text, labels=_LABELS)
    family.add_metric([model], value)
    return family


def _counter(name: str, text: str, labels: list[str], values: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"hortator_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
