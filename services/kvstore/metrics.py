"""Prometheus metrics of kvstore, read from the service when somebody looks."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.kvstore.service import KvstoreService
from services.kvstore.tier.service import SecondTier


class KvstoreMetrics(Collector):
    def __init__(self, service: KvstoreService) -> None:
        self._service = service

    def collect(self) -> Iterable[Any]:
        core = self._service.core
        counters = {
            "events": (core.counts.events, "KV events heard"),
            "events_repeated": (core.counts.repeated, "KV events that were old or had been heard before"),
            "gaps": (core.counts.gaps, "Gaps seen in the events of an instance"),
            "restates_asked": (core.counts.asked, "Restates asked for"),
            "restates": (core.counts.restates, "Restates begun"),
            "instances_expired": (core.counts.expired, "Instances forgotten after three silent heartbeats"),
            "rows_lost": (core.counts.rows_lost, "Index rows the store had lost"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"hortator_kvstore_{name}", text, value=value)
        yield GaugeMetricFamily(
            "hortator_kvstore_writing", "1 while we write the index", value=self._service.writing
        )
        yield GaugeMetricFamily("hortator_kvstore_instances", "Instances heard of", value=core.heard_of)
        held = GaugeMetricFamily(
            "hortator_kvstore_index_blocks", "Indexed blocks of each instance", labels=["instance"]
        )
        for instance, blocks in core.blocks.items():
            held.add_metric([instance], blocks)
        yield held
        distinct = GaugeMetricFamily(
            "hortator_kvstore_index_keys", "Distinct blocks in the index, by the last sweep", labels=["model"]
        )
        for model, blocks in self._service.swept_blocks.items():
            distinct.add_metric([model], blocks)
        yield distinct


class TierMetrics(Collector):
    """Of the second tier."""

    def __init__(self, tier: SecondTier) -> None:
        self._tier = tier

    def collect(self) -> Iterable[Any]:
        book, server = self._tier.store.book, self._tier.server
        counts = book.counts
        counters: dict[str, tuple[float, str]] = {
            "stored": (counts.stored, "Blocks stored"),
            "had": (counts.had, "Blocks offered that were there before"),
            "hits": (counts.hits, "Blocks read"),
            "misses": (counts.misses, "Blocks asked for that were not there"),
            "disk_reads": (counts.disk_reads, "Blocks read from disk"),
            "spilled": (counts.spilled, "Blocks written to disk"),
            "evicted": (counts.evicted, "Blocks that left for others"),
            "dropped": (counts.dropped, "Of these, blocks the disk had no time or room for"),
            "corrupt": (counts.corrupt, "Blocks removed as they were not what was stored"),
            "refused": (counts.refused, "Blocks refused as nothing may leave for them"),
            "wrong": (counts.wrong, "Blocks refused as they do not have the digest they came with"),
            "received_bytes": (counts.bytes_in, "Bytes of blocks received"),
            "sent_bytes": (counts.bytes_out, "Bytes of blocks sent"),
            "requests": (server.counts.requests, "Requests of workers' ranks"),
            "connections_opened": (server.counts.connections, "Connections accepted"),
            "connections_refused": (server.counts.refused, "Connections that were turned away or misbehaved"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"hortator_tier_{name}", text, value=value)
        gauges: dict[str, tuple[float, str]] = {
            "received_bytes_per_s": (self._tier.received.per_s, "Over the last ten seconds"),
            "sent_bytes_per_s": (self._tier.sent.per_s, "Over the last ten seconds"),
            "connections": (server.connected, "Connections open"),
            "pinned_bytes": (book.pinned_bytes, "Bytes held by leases"),
            "leases": (book.leases, "Leases"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"hortator_tier_{name}", text, value=value)
        held = GaugeMetricFamily("hortator_tier_bytes", "Bytes of blocks, by place", labels=["place"])
        budget = GaugeMetricFamily("hortator_tier_budget_bytes", "Bytes there may be", labels=["place"])
        blocks = GaugeMetricFamily("hortator_tier_blocks", "Blocks, by place", labels=["place"])
        used = {"memory": book.arena.used, "disk": book.disk_used}
        for place, count in book.blocks.items():
            held.add_metric([place], used[place])
            budget.add_metric([place], book.arena.budget if place == "memory" else book.disk_bytes)
            blocks.add_metric([place], count)
        yield from (held, budget, blocks)
