"""What ranks need for a load, before anything is started: a ledger for each rank of an instance. Pure.

Models that the engine computes are predicted as it allocates (`served.py`); all others, and stages of a
pipeline, by their parameters, with norms and biases in float32 as the engine keeps them.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from services.worker.engine.config import ModelConfig
from services.worker.memory.block_size import BlockChoice, choose_block_tokens, choose_for
from services.worker.memory.devices import Device
from services.worker.memory.ledger import Ledger
from services.worker.memory.served import Load, message_bytes, predict_rank, weight_format
from services.worker.memory.sizes import ModelSizes, Part
from services.worker.parallel.split import Span, deal, plan_shards

STEP_TOKENS = 2048
"""Of the widest step, as workers are set up by default."""
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LONG = 1 << 17
"""Context of models that do not say theirs, for the length of tables."""


@dataclass(frozen=True)
class Demand:
    """What is to be served."""

    concurrency: int
    """Sequences at once."""
    context: int
    """Tokens of each, prompt and output."""
    output: int
    """Tokens of the context that are generated."""
    dtype: str
    kv_dtype: str
    reserved: int = 0
    """Tokens whose KV is set aside for each sequence from its start, as without paging; 0: what it uses."""
    block_tokens: int = 0
    """0: chosen by what blocks cost."""
    step_tokens: int = STEP_TOKENS
    staging_bytes: int = 0
    """Of each rank, for KV on its way to and from the second tier."""
    gap_s: float = 0.25
    """What a step may take."""

    @property
    def kept(self) -> int:
        """Tokens of a sequence that take memory."""
        return max(self.reserved, self.context)

    @property
    def prompt(self) -> int:
        return max(1, self.context - self.output)

    @property
    def weight_bytes(self) -> int:
        """Of one weight."""
        return weight_format(self.dtype).bytes

    @property
    def kv_bytes(self) -> int:
        """Of one element."""
        return KV_BYTES[self.kv_dtype]


@dataclass(frozen=True)
class Case:
    """What is planned for."""

    model: ModelSizes
    device: Device
    demand: Demand
    count: int = 1
    """Devices there are."""


@dataclass(frozen=True)
class Layout:
    """Devices as `replicas` independent instances of `stages` × `tp` ranks."""

    replicas: int = 1
    tp: int = 1
    stages: int = 1

    @property
    def ranks(self) -> int:
        """Of one instance."""
        return self.tp * self.stages

    @property
    def devices(self) -> int:
        return self.replicas * self.ranks

    def sequences(self, concurrency: int) -> int:
        """Of the instance that has most."""
        return ceil(concurrency / self.replicas)

    def __str__(self) -> str:
        if self.devices == 1:
            return "one device"
        parts = (("tensor", self.tp), ("pipeline", self.stages), ("data", self.replicas))
        return " × ".join(f"{name} {count}" for name, count in parts if count > 1)


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a model."""

    stage: int
    part: Part
    layers: Span
    first: bool
    """It has the embedding."""
    last: bool
    """It has the head."""


def holdings(model: ModelSizes, layout: Layout) -> tuple[Holding, ...]:
    """Of each rank of an instance, stage by stage. Raises ValueError where the model cannot be split so."""
    parts = model.parts(layout.tp)
    if layout.stages > 1 and layout.stages > model.layers:
        raise ValueError(f"{layout.stages} stages: the model has only {model.layers} layers for them")
    runs = deal(model.layers, layout.stages) if model.known else [Span(0, 1)]
    return tuple(
        Holding(i, part, run, i == 0, i == len(runs) - 1) for i, run in enumerate(runs) for part in parts
    )


def block_choice(case: Case, tp: int) -> BlockChoice | None:
    """Tokens of a block, as workers choose them; None where there is no KV. ValueError as of `parts`."""
    model, demand = case.model, case.demand
    if not model.known:
        return None
    if model.config is not None:
        return choose_for(model.config, plan_shards(model.config, tp), demand.kv_dtype, demand.block_tokens)
    heads = min(part.kv_heads for part in model.parts(tp))
    return choose_block_tokens(
        model.kv_elements(heads) * demand.kv_bytes,
        (model.latent or model.head_dim) * demand.kv_bytes,
        model.max_len or max(demand.kept, _LONG),
        demand.block_tokens,
    )


def blocks_of(demand: Demand, block_tokens: int, sequences: int) -> int:
    """Blocks that so many sequences need."""
    return sequences * -(-demand.kept // block_tokens)


def ledgers(case: Case, layout: Layout) -> tuple[Ledger, ...]:
    """Of each rank of the instance that has most sequences, as `holdings`. Raises ValueError as there."""
    model, device, demand = case.model, case.device, case.demand
    choice = block_choice(case, layout.tp)
    tokens = choice.chosen.block_tokens if choice else 1
    blocks = blocks_of(demand, tokens, layout.sequences(demand.concurrency)) if choice else 0
    if model.config is not None and layout.stages == 1 and device.kind in ("cpu", "cuda"):
        load = Load(
            dtype=demand.dtype,
            kv_dtype=demand.kv_dtype,
            blocks=blocks,
            block_tokens=tokens,
            kernels="native" if device.kind == "cpu" else "cuda",
            step_tokens=demand.step_tokens,
            slots=layout.sequences(demand.concurrency),
            threads=device.threads,
            runtime_bytes=device.runtime_bytes,
            staging_bytes=demand.staging_bytes,
        )
        return _served(model.config, layout.tp, load)
    return tuple(
        Ledger(
            runtime_bytes=device.runtime_bytes,
            weights_bytes=weights_bytes(model, demand, holding),
            kv_bytes=blocks * tokens * kv_token_bytes(model, demand, holding) if choice else 0,
            activation_bytes=_activation_bytes(model, demand, layout, holding),
            workspace_bytes=_workspace_bytes(model, demand, layout),
        )
        for holding in holdings(model, layout)
    )


def _served(config: ModelConfig, tp: int, load: Load) -> tuple[Ledger, ...]:
    """Ranks that hold as much as another are computed once."""
    known: dict[tuple[object, ...], Ledger] = {}
    found = []
    for shard in plan_shards(config, tp).shards:
        alike = shard.groups, shard.ffn.size, shard.vocab.size, shard.rank == 0
        if alike not in known:
            known[alike] = predict_rank(config, shard, load)
        found.append(known[alike])
    return tuple(found)


def weights_bytes(model: ModelSizes, demand: Demand, holding: Holding) -> int:
    """Of a rank, by the parameters it holds."""
    p, part, share = model.parameters, holding.part, _layer_share(model, holding)
    matrices = p.attention * share * part.attention(model)
    matrices += (p.feed_forward + p.experts) * share * part.feed_forward
    tables = (p.embedding if holding.first else 0) + (p.head if holding.last else 0)
    if holding.last and not holding.first and model.tied:
        tables += p.embedding
    return ceil((matrices + tables * part.vocabulary) * demand.weight_bytes + 4 * p.vectors * share)


def kv_token_bytes(model: ModelSizes, demand: Demand, holding: Holding) -> int:
    """Of a token on this rank."""
    whole = model.kv_elements(holding.part.kv_heads) // max(model.layers, 1)
    return whole * holding.layers.size * demand.kv_bytes


def _layer_share(model: ModelSizes, holding: Holding) -> Fraction:
    return Fraction(holding.layers.size, model.layers) if model.known else Fraction(1)


def _activation_bytes(model: ModelSizes, demand: Demand, layout: Layout, holding: Holding) -> int:
    """Residual stream, its norm, queries, keys, values, attended heads and channels of the widest step, and
    logits of every sequence three times, in float32."""
    if not model.known:
        return 0
    own = holding.part
    heads = (2 * own.heads + 2 * own.kv_heads) * model.head_dim
    inner = model.intermediate or 4 * model.hidden
    channels = ceil(inner * max(1, model.experts_used) * own.feed_forward)
    rows = min(layout.sequences(demand.concurrency), demand.step_tokens)
    logits = rows * ceil(model.vocab_size * own.vocabulary) if holding.last else 0
    return 4 * (demand.step_tokens * (2 * model.hidden + heads + channels) + 3 * logits)


def _workspace_bytes(model: ModelSizes, demand: Demand, layout: Layout) -> int:
    if layout.ranks == 1 or not model.known:
        return 0
    if model.config is not None:
        return message_bytes(model.config, layout.ranks, demand.step_tokens)
    return 2 * 4 * max(1 << 18, 2 * model.hidden * demand.step_tokens)
