"""Prometheus metrics of kvstore, read from the service when somebody looks."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.kvstore.service import KvstoreService


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
