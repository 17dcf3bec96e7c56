"""What the scheduler says of itself: service statistics and Prometheus metrics, both read from the core."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.scheduler.core import Core
from services.scheduler.counters import Counters

COUNTERS = {
    "steps": "Step frames whose result is in",
    "tokens": "Output tokens of all results",
    "busy_us": "Microseconds instances spent computing these steps",
    "idle_us": "Microseconds they had nothing to do before them",
    "computed_tokens": "Tokens computed by the frames issued, recomputation included",
    "recomputed_tokens": "Of these, tokens an earlier attempt had computed",
    "prompt_tokens": "Prompt tokens of admitted sequences",
    "prefix_hit_tokens": "Of these, tokens whose KV was found cached",
    "fetches": "Fetches from the second tier that ended",
    "fetches_short": "Of these, fetches that did not bring all they were to",
    "preemptions": "Sequences sent back to the queue because others needed their blocks or slot",
    "preemptions_offload": "Of these, sequences whose blocks were kept in the second tier",
    "preemptions_urgent": "Of these, sequences that made way for a more urgent one",
    "offloaded_tokens": "Tokens whose KV preempted sequences left in the second tier",
    "offload_saved_tokens": "Tokens they had back from there and did not compute again",
    "requeued": "Sequences sent back to the queue because their instance was lost",
    "frames_resent": "Step frames sent again",
    "tokens_frames_resent": "Token frames sent again",
    "stale_refused": "Frames of a fenced or former session that were refused",
    "queue_full": "Requests refused because the queue was full",
    "expired": "Sequences ended by a deadline",
    "cancelled": "Sequences ended by their client",
    "clients_lapsed": "Clients whose lease ended",
    "instances_lost": "Instances lost",
    "takeovers": "Times this process became the leader",
}


def stats(core: Core) -> dict[str, Any]:
    """Data of `$SRV.STATS`."""
    waiting_for = [sequence.request.pin for sequence in core.desk.queue]
    return {
        "epoch": core.leadership.epoch if core.leads else core.leadership.top_epoch,
        "owner": core.owner if core.leads else core.leadership.top_owner,
        "state": core.leadership.rule.value,
        "queue": len(waiting_for),
        "preemption": preemption(core.counters),
        "instances": [
            {
                "id": instance.id,
                "role": instance.info.role,
                "state": instance.state.value,
                "running": len(instance.running),
                # All that may go there; with several instances the same sequence counts for each.
                "waiting": waiting_for.count(instance.id) + waiting_for.count(""),
                "blocks_total": instance.info.blocks_total,
                "blocks_free": instance.pool.free,
                "blocks_cached": instance.pool.cached,
                "prefill_tok_s": round(instance.fit.prefill_tok_s, 1),
                "decode_tok_s": round(instance.fit.decode_tok_s, 1),
            }
            for instance in core.fleet.instances.values()
        ],
    }


def preemption(counters: Counters) -> dict[str, Any]:
    """Sequences sent back, by kind, and what that cost and saved, since the process began."""
    return {
        "preempted": counters.preemptions,
        "offloaded": counters.preemptions_offload,
        "for_urgent": counters.preemptions_urgent,
        "recomputed_tokens": counters.recomputed_tokens,
        "saved_tokens": counters.offload_saved_tokens,
        "recompute_tax": round(counters.recomputed_tokens / max(1, counters.computed_tokens), 5),
    }


class CoreMetrics(Collector):
    """Reads the core at each scrape; nothing is counted twice."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def collect(self) -> Iterable[Any]:
        core = self._core
        for name, text in COUNTERS.items():
            family = CounterMetricFamily(f"hortator_scheduler_{name}", text)
            family.add_metric([], getattr(core.counters, name))
            yield family
        singles = {
            "leads": ("1 while this process leads", float(core.leads)),
            "epoch": ("Its epoch, or the highest it heard of", float(stats(core)["epoch"])),
            "queue_depth": ("Sequences that wait", float(len(core.desk.queue))),
            "clients": ("Clients with a record", float(len(core.desk.clients))),
        }
        for name, (text, value) in singles.items():
            gauge = GaugeMetricFamily(f"hortator_scheduler_{name}", text)
            gauge.add_metric([], value)
            yield gauge
        yield from self._instances()

    def _instances(self) -> Iterable[GaugeMetricFamily]:
        gauges = {
            "running": ("Sequences in slots", lambda i: len(i.running)),
            "blocks_free": ("Blocks nobody holds", lambda i: i.pool.free),
            "blocks_cached": ("Blocks that can be found by their hash", lambda i: i.pool.cached),
            "blocks_reserved": ("Blocks set aside for expected output", lambda i: i.reserved),
            "fetches": ("Fetches from the second tier that have not ended", lambda i: len(i.fetches)),
            "prompt_share": (
                "Part of its time that prompts took lately",
                lambda i: i.prompt_share(self._core.leadership.last_tick),
            ),
            "frames_in_flight": ("Frames without a result", lambda i: len(i.in_flight)),
            "step_seconds": ("Length of recent steps", lambda i: i.fit.step_s),
            "budget_tokens": (
                "Prompt tokens the next step may compute",
                lambda i: self._core.rules.budget.prefill_tokens(
                    i.fit.cost, i.decoding, i.info.max_step_tokens, i.fit.overrun
                ),
            ),
            "cost_fixed_seconds": ("Fitted cost of a step", lambda i: i.fit.cost.fixed_s),
            "cost_decode_seconds": (
                "Fitted cost of a decoding sequence",
                lambda i: i.fit.cost.per_decode_s,
            ),
            "step_overrun": (
                "Share by which steps with prompts outlast their forecast",
                lambda i: i.fit.overrun,
            ),
            "cost_token_seconds": ("Fitted cost of a prompt token", lambda i: i.fit.cost.per_token_s),
        }
        for name, (text, read) in gauges.items():
            gauge = GaugeMetricFamily(f"hortator_instance_{name}", text, labels=["instance"])
            for instance in self._core.fleet.instances.values():
                gauge.add_metric([instance.id], float(read(instance)))
            yield gauge
