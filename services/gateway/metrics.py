"""What the gateway measures of requests: families as vLLM has them, observed once per request or choice."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.wire import SeqTimes

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.25,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class GatewayMetrics:
    """Registered in `registry` under `hortator_*`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        label = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"hortator_{name}", text, label, buckets=buckets, registry=registry)
            return family.labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"hortator_{name}", text, label, registry=registry).labels(model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"hortator_{name}", text, label, registry=registry).labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._gap = histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of a choice", _GAPS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From request to last byte", _SECONDS)
        self._phases = {
            "queue_s": histogram("request_queue_time_seconds", "Waiting for a slot", _SECONDS),
            "prefill_s": histogram("request_prefill_time_seconds", "Computing the prompt", _SECONDS),
            "decode_s": histogram("request_decode_time_seconds", "Producing tokens", _SECONDS),
            "preempted_s": histogram("request_preempted_time_seconds", "Set aside for others", _SECONDS),
            "recomputed_s": histogram("request_recomputed_time_seconds", "Computed again", _SECONDS),
            "stalled_s": histogram("request_stalled_time_seconds", "Held up by a failure", _SECONDS),
        }
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens of a choice", _TOKENS)
        self._prompt_total = counter("prompt_tokens", "Prompt tokens in all")
        self._output_total = counter("generation_tokens", "Output tokens in all")
        self.running = gauge("num_requests_running", "Requests that have got a first token")
        self.waiting = gauge("num_requests_waiting", "Requests without a token yet")
        self._success = Counter(
            "hortator_request_success",
            "Choices that ended well",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._outcomes = Counter(
            "hortator_requests", "Requests by outcome", ["model_name", "outcome"], registry=registry
        )
        self._statuses = Counter(
            "hortator_http_errors", "Answers with an error status", ["status", "code"], registry=registry
        )
        self._model = model

    def began(self, prompt_tokens: int) -> None:
        self._prompt.observe(prompt_tokens)
        self._prompt_total.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def choice_ended(self, tokens: int, seconds: float, reason: str) -> None:
        """`seconds` from the first token to the last."""
        self._output.observe(tokens)
        self._output_total.inc(tokens)
        if tokens > 1:
            self._gap.observe(seconds / (tokens - 1))
        self._success.labels(self._model, reason).inc()

    def times(self, times: SeqTimes) -> None:
        """The parts of a choice's time that were not nothing; the first three always."""
        for number, (name, family) in enumerate(self._phases.items()):
            seconds = getattr(times, name)
            if seconds or number < 3:
                family.observe(seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        self._e2e.observe(seconds)
        self._outcomes.labels(self._model, outcome).inc()

    def http_error(self, status: int, code: str | None) -> None:
        self._statuses.labels(str(status), code or "").inc()
