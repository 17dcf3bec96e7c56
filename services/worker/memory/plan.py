"""A plan: a ledger with its arithmetic, the options and one recommendation for a model on devices. Pure."""

from dataclasses import dataclass
from typing import Any

from services.worker.memory.block_size import BlockChoice
from services.worker.memory.devices import Device
from services.worker.memory.footprint import Case, Demand, block_choice, blocks_of
from services.worker.memory.ledger import Ledger
from services.worker.memory.options import Option, fewest_devices, nearest, options, wider_option
from services.worker.memory.recommend import Recommendation, choose, gb, recommend, refuse
from services.worker.memory.sizes import ModelSizes

_MANY = 12


@dataclass(frozen=True)
class Plan:
    """What `hortator plan` shows."""

    case: Case
    options: tuple[Option, ...]
    planned: Option
    """Whose ledger is shown: what is recommended, or comes nearest to fitting."""
    recommendation: Recommendation
    block: BlockChoice | None
    """None where there is no KV."""

    @property
    def model(self) -> ModelSizes:
        return self.case.model

    @property
    def device(self) -> Device:
        return self.case.device

    @property
    def demand(self) -> Demand:
        return self.case.demand

    @property
    def compared(self) -> tuple[Option, ...]:
        """The options worth a person's eye: all, or of many one device, those that use all devices, and what
        is recommended."""
        if len(self.options) <= _MANY:
            return self.options
        return tuple(
            o
            for o in self.options
            if o is self.planned
            or o.layout.devices == 1
            or o.layout.replicas == self.case.count // o.layout.ranks
        )

    @property
    def ledger(self) -> Ledger:
        """Over all ranks."""
        return self.planned.total

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        m, d, planned = self.model, self.device, self.planned
        return {
            "model": {
                "name": m.name,
                "parameters": m.parameters.total,
                "layers": m.layers,
                "hidden": m.hidden,
                "heads": m.heads,
                "kv_heads": m.kv_heads,
                "head_dim": m.head_dim,
                "max_len": m.max_len,
                "served": m.config is not None,
                "reason": m.reason,
            },
            "device": {
                "name": d.name,
                "kind": d.kind,
                "memory_bytes": d.memory_bytes,
                "read_gb_s": d.read_b_s / 1e9,
                "tflops": d.flop_s / 1e12,
                "link_gb_s": d.link_b_s / 1e9,
                "source": d.source,
                "reach": d.reach.origin,
            },
            "count": self.case.count,
            "concurrency": self.demand.concurrency,
            "context": self.demand.context,
            "output": self.demand.output,
            "reserved": self.demand.reserved or None,
            "dtype": self.demand.dtype,
            "kv_dtype": self.demand.kv_dtype,
            "block_tokens": self.block.chosen.block_tokens if self.block else None,
            "block": self.block.describe() if self.block else None,
            "layout": str(planned.layout),
            "fits": planned.fits,
            "verdict": planned.verdict,
            "used_share": planned.used,
            "max_concurrency": planned.max_concurrency,
            "ledger": self.ledger.as_dict(),
            "ranks": [
                {"instance": instance, "rank": rank} | ledger.as_dict()
                for instance in range(planned.layout.replicas)
                for rank, ledger in enumerate(planned.ranks)
            ],
            "options": [option.as_dict() for option in self.options],
            "recommendation": self.recommendation.as_dict(),
            "arithmetic": self.arithmetic(),
            "assumptions": self.assumptions(),
        }

    def arithmetic(self) -> list[str]:
        """The ledger's sums, line by line, over all ranks of the planned option."""
        m, demand, layout, total = self.model, self.demand, self.planned.layout, self.ledger
        lines = [_weights(m, demand, total.weights_bytes, layout.replicas, layout.ranks)]
        if self.block is not None:
            lines += self._kv_lines()
            lines.append(f"blocks: {self.block.describe()}")
            lines.append(
                f"activations {gb(total.activation_bytes)}: a step of {demand.step_tokens:,} tokens, and "
                f"logits of {layout.sequences(demand.concurrency):,} sequences"
            )
        else:
            lines.append("KV and activations are unknown, and left out: give --layers, --hidden and --heads")
        ranks = f"{layout.devices} × " if layout.devices > 1 else ""
        lines += [
            f"runtime {ranks}{gb(self.device.runtime_bytes)}; workspace {gb(total.workspace_bytes)}; staging "
            f"{gb(total.staging_bytes)}",
            _sum(total),
            f"fullest rank {gb(self.planned.fullest.total_bytes)} of {gb(self.device.memory_bytes)} = "
            f"{self.planned.used:.1%}: {self.planned.verdict}"
            + ", as far as it is known"
            * (self.block is None),
        ]
        return lines

    def _kv_lines(self) -> list[str]:
        m, demand, layout = self.model, self.demand, self.planned.layout
        assert self.block is not None
        tokens = self.block.chosen.block_tokens
        if m.latent:
            each = f"{m.layers} layers × {m.latent} × {demand.kv_bytes} bytes"
        else:
            each = f"2 × {m.layers} layers × {m.kv_heads} KV heads × {m.head_dim} × {demand.kv_bytes} bytes"
        token = m.kv_elements() * demand.kv_bytes
        sequences = layout.sequences(demand.concurrency)
        blocks = blocks_of(demand, tokens, sequences)
        whole = blocks * tokens * token * layout.replicas
        instances = f"{layout.replicas} instances × " if layout.replicas > 1 else ""
        lines = [
            f"a token's KV: {each} = {token:,} bytes",
            f"KV: {instances}{sequences:,} sequences × {demand.kept:,} tokens ({blocks:,} blocks of "
            f"{tokens}) × {token:,} bytes = {gb(whole)}",
        ]
        kv = self.ledger.kv_bytes
        if kv > whole:
            lines.append(f"KV heads that several ranks hold: {kv / whole:.2f} × as much = {gb(kv)}")
        if demand.reserved > demand.context:
            used = blocks_of(demand, tokens, sequences) * tokens * token * demand.context // demand.reserved
            lines.append(
                f"of it used: {demand.context:,} of {demand.reserved:,} reserved tokens, "
                f"{demand.context / demand.reserved:.0%} = {gb(used * layout.replicas)}; paging keeps no more"
            )
        return lines

    def assumptions(self) -> list[str]:
        """What the figures rest on, beyond the model's own sizes."""
        m, d = self.model, self.device
        found = [f"{d.name}: {d.source or 'as given'}", f"reached rates: {d.reach.origin}"]
        if m.reason:
            found.append(f"this model cannot be served here: {m.reason}")
        if d.shared:
            found.append("ranks of one machine share its cores and memory: steps get no shorter for them")
        if d.kind not in ("cpu", "cuda"):
            found.append(f"this engine does not compute on {d.kind} devices")
        if d.kind != "cpu" and self.demand.dtype.startswith("int8"):
            found.append(f"--dtype {self.demand.dtype} is computed on CPUs only; on a GPU it is not served")
        if d.kind == "cpu" and "bfloat16" in (self.demand.dtype, self.demand.kv_dtype):
            found.append("bfloat16 is computed on CUDA devices only: take float16, as small")
        if any(not option.served for option in self.options):
            found.append("pipeline parallelism is shown for comparison; this engine does not serve it")
        return [*found, *m.notes]


def make_plan(case: Case, tp: int = 0) -> Plan:
    """With `tp` ranks an instance if asked. Raises ValueError where the model cannot be split so."""
    found = options(case, tp)
    chosen = choose(found, case.demand.gap_s)
    if chosen is None:
        advice = refuse(case, found, fewest_devices(case, tp))
    else:
        # Ranks that share a machine would share it with more, and be slower each.
        wider = None if case.device.shared else wider_option(case, chosen)
        advice = recommend(case, chosen, None if tp else found[0], wider)
    planned = chosen or nearest(found)
    return Plan(case, found, planned, advice, block_choice(case, planned.layout.tp))


def _weights(m: ModelSizes, demand: Demand, total: int, replicas: int, ranks: int) -> str:
    count = m.parameters.total
    plain = count * demand.weight_bytes * replicas
    times = f"{replicas} × " if replicas > 1 else ""
    line = f"weights: {times}{count:,} parameters × {demand.weight_bytes} bytes = {gb(plain)}"
    if total == plain:
        return line
    return f"{line}; with norms in float32, tables and what ranks repeat {gb(total)}"


def _sum(total: Ledger) -> str:
    parts = [f"{name} {gb(size)}" for name, size in named(total) if size]
    return f"{' + '.join(parts)} = {gb(total.total_bytes)}"


def named(ledger: Ledger) -> list[tuple[str, int]]:
    """Classes with the names that people read."""
    return [
        ("runtime", ledger.runtime_bytes),
        ("weights", ledger.weights_bytes),
        ("KV", ledger.kv_bytes),
        ("activations", ledger.activation_bytes),
        ("workspace", ledger.workspace_bytes),
        ("staging", ledger.staging_bytes),
    ]
