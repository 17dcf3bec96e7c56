"""What a worker counts, for /metrics."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.worker.compute import Outcome
from services.worker.gate import Verdict

_STEP_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 3)


class WorkerMetrics:
    """Label children are made once: a step costs a few additions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._step = Histogram(
            "hortator_worker_step_seconds", "Wall time of a step", buckets=_STEP_BUCKETS, registry=registry
        )
        tokens = Counter("hortator_worker_tokens", "Tokens computed", ["kind"], registry=registry)
        self._prefill, self._decode = tokens.labels("prefill"), tokens.labels("decode")
        self._slots = Gauge(
            "hortator_worker_slots", "Slots whose sequence has not stopped", registry=registry
        )
        self._stored = Counter("hortator_worker_blocks_stored", "Blocks confirmed", registry=registry)
        self._starved = Counter(
            "hortator_worker_starved_seconds", "Time without a frame while sequences ran", registry=registry
        )
        frames = Counter(
            "hortator_worker_frames", "Step frames by verdict of the gate", ["verdict"], registry=registry
        )
        self._frames = {verdict: frames.labels(verdict.value) for verdict in Verdict}
        self._broken = Counter(
            "hortator_worker_sessions_broken", "Sessions ended by a contradictory frame", registry=registry
        )
        self._ran_before = 0
        self._group = _GroupMetrics(registry)
        self._tier = _TierMetrics(registry)
        self._memory = _MemoryMetrics(registry)

    def frame(self, verdict: Verdict) -> None:
        self._frames[verdict].inc()

    def step(self, outcome: Outcome) -> None:
        done = outcome.done
        timing = done.timing
        self._step.observe(timing.run_us * 1e-6)
        if timing.prefill_tokens:
            self._prefill.inc(timing.prefill_tokens)
        if timing.decode_tokens:
            self._decode.inc(timing.decode_tokens)
        if done.stored:
            self._stored.inc(len(done.stored))
        if timing.idle_us and self._ran_before:
            self._starved.inc(timing.idle_us * 1e-6)
        if outcome.running != self._ran_before:
            self._slots.set(outcome.running)
            self._ran_before = outcome.running

    def group(self, report: dict[str, Any]) -> None:
        """What the group tells of its communication; empty of a rank alone."""
        if report:
            self._group.update(report)

    def memory(self, report: dict[str, Any]) -> None:
        """The ledgers of all ranks; empty of an instance that keeps none."""
        if report:
            self._memory.update(report)

    def memory_now(self, now: dict[str, Any]) -> None:
        """What rank 0 has and may still take; empty where the system does not tell."""
        if now:
            self._memory.now(now)

    def tier(self, report: dict[str, Any]) -> None:
        """What rank 0 tells of its traffic with the second tier; empty if it has none."""
        if report:
            self._tier.update(report)

    def session_began(self) -> None:
        self._ran_before = 0
        self._slots.set(0)

    def session_broke(self) -> None:
        self._broken.inc()


class _MemoryMetrics:
    """Bytes by class, predicted and measured."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ledger = Gauge(
            "hortator_worker_memory_bytes",
            "Memory of a rank by class, as predicted and as measured at its start",
            ["rank", "kind", "class"],
            registry=registry,
        )
        self._resident = Gauge(
            "hortator_worker_resident_bytes", "Memory that rank 0 has now", registry=registry
        )
        self._free = Gauge(
            "hortator_worker_free_bytes",
            "Memory that rank 0 may still take, of its machine and control group",
            registry=registry,
        )

    def update(self, report: dict[str, Any]) -> None:
        for number, rank in enumerate(report["ranks"]):
            for kind in ("predicted", "measured"):
                for name, count in (rank[kind] or {}).items():
                    self._ledger.labels(str(number), kind, name.removesuffix("_bytes")).set(count)

    def now(self, now: dict[str, Any]) -> None:
        self._resident.set(now["resident_bytes"])
        self._free.set(now["free_bytes"])


class _TierMetrics:
    """Blocks on their way to the second tier and back, of rank 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        blocks = Counter(
            "hortator_worker_tier_blocks",
            "Blocks by what became of them: sent, there (before they were sent), refused, saved (copied "
            "before they were overwritten), dropped (there was no room for that), fetched, missed",
            ["what"],
            registry=registry,
        )
        self._blocks = {
            what: blocks.labels(what)
            for what in ("sent", "there", "refused", "saved", "dropped", "fetched", "missed")
        }
        self._gauges = {
            what: Gauge(f"hortator_worker_tier_{what}", text, registry=registry)
            for what, text in (
                ("waiting", "Blocks that wait to be sent to the second tier"),
                ("staged", "Blocks of the staging memory in use"),
                ("fetching", "Fetches that have not ended"),
            )
        }
        self._block_s = Gauge(
            "hortator_worker_tier_block_seconds",
            "One block more of a fetch, and computed instead",
            ["how"],
            registry=registry,
        )
        self._told = dict.fromkeys(self._blocks, 0)

    def update(self, report: dict[str, Any]) -> None:
        for what, counter in self._blocks.items():
            counter.inc(report[what] - self._told[what])
            self._told[what] = report[what]
        for what, gauge in self._gauges.items():
            gauge.set(report[what])
        for how in ("fetch", "compute"):
            self._block_s.labels(how).set(report[f"{how}_block_us"] * 1e-6)


class _GroupMetrics:
    """Rank 0's time: computing, what its messages take alone, and what of it nothing was computed behind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._totals = {
            what: Counter(f"hortator_worker_{what}_seconds", text, registry=registry)
            for what, text in (
                ("compute", "Time rank 0 of the group computed in passes"),
                ("communication", "Time the messages of passes take when nothing else is done"),
                ("exposed_communication", "Time rank 0 waited for messages with nothing to compute"),
            )
        }
        self._layer = Gauge(
            "hortator_worker_layer_seconds",
            "One layer of recent steps",
            ["step", "part"],
            registry=registry,
        )
        self._share = Gauge(
            "hortator_worker_communication_share",
            "Communication of recent steps over their computing time",
            ["step"],
            registry=registry,
        )
        self._told = dict.fromkeys(self._totals, 0.0)

    def update(self, report: dict[str, Any]) -> None:
        for what, counter in self._totals.items():
            counter.inc(max(0.0, report[f"{what}_s"] - self._told[what]))
            self._told[what] = report[f"{what}_s"]
        for step, layer in report["recent"].items():
            for part in ("compute", "communication", "exposed"):
                self._layer.labels(step, part).set(layer[f"{part}_us"] * 1e-6)
            self._share.labels(step).set(layer["share"])
