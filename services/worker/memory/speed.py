"""How long steps take, before anything is started: bytes over bandwidth plus operations over rate. Pure.

Reading and arithmetic are added, as measured on CPUs (`Reach`), which is the cautious side on GPUs. Messages
are those of the engine: two sums a layer and one of the embedding, by the fastest of the ways it knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from services.worker.memory.devices import NETWORK_B_S, NETWORK_S, Device
from services.worker.memory.footprint import Case, Demand, Holding, Layout, holdings, kv_token_bytes
from services.worker.parallel.advice import Layer, steps

HIDDEN = 0.9
"""Share of a prompt's messages that computing hides, of what could be: 0.92 was measured at 1 Gbit/s."""
_WAYS = ("direct", "scatter", "tree", "ring")
_CANDIDATE_BYTES = 32
"""What a rank tells others of each token drawn from its part of the vocabulary."""
_FLOAT32_TIMES = 15
"""float32 matrices of GPUs take about so many times as long as 16-bit ones."""


@dataclass(frozen=True)
class Speed:
    """Predicted of one instance at the context that was asked for."""

    decode: Layer
    """A layer of a step in which every sequence gets a token."""
    prompt: Layer
    """A layer of a step that is part of a prompt alone."""
    sequences: int
    prompt_tok_s: float
    tok_s: float
    """Tokens generated a second while prompts of new sequences take the places of those that end."""
    ttft_s: float
    """Of a prompt alone on the instance."""

    @property
    def decode_tok_s(self) -> float:
        """While nobody's prompt is computed."""
        return self.sequences / self.decode.step_s


def predict_speed(case: Case, layout: Layout) -> Speed | None:
    """Of the instance that has most sequences; None where only a number of parameters is known.

    Raises ValueError where the model cannot be split so.
    """
    if not case.model.known:
        return None
    demand = case.demand
    held = holdings(case.model, layout)
    sequences = layout.sequences(demand.concurrency)
    chunk = min(demand.step_tokens, demand.prompt)
    decode, prompt = _decode(case, layout, held), _prompt(case, layout, held, chunk)
    # Chunks follow one another through the stages, so each stage's time counts once a chunk.
    prompt_tok_s = chunk / (prompt.step_s / layout.stages)
    fill_s = prompt.step_s - prompt.step_s / layout.stages
    request_s = demand.prompt / prompt_tok_s + demand.output * decode.step_s / sequences
    return Speed(
        decode=decode,
        prompt=prompt,
        sequences=sequences,
        prompt_tok_s=prompt_tok_s,
        tok_s=demand.output / request_s,
        ttft_s=demand.prompt / prompt_tok_s + fill_s,
    )


def message_s(device: Device, ranks: int, size: float) -> float:
    """Seconds of a sum of `size` bytes over so many ranks; those that leave an island go by the network."""
    if ranks == 1:
        return 0.0
    latency_s, b_s = _link(device, ranks)
    ways = (steps(way, ranks) for way in _WAYS)
    return min(way.hops * latency_s + way.volume * size / b_s for way in ways)


def _link(device: Device, ranks: int) -> tuple[float, float]:
    if ranks <= device.island or device.kind == "cpu":
        return device.link_s, device.link_b_s
    return max(NETWORK_S, device.link_s), min(NETWORK_B_S, device.link_b_s)


@dataclass(frozen=True)
class _Pass:
    """What a rank computes at once."""

    tokens: int
    pairs: int
    """Of tokens with those that they attend to."""
    kv_tokens: int
    """Whose keys and values are read."""
    drawn: int
    """Tokens whose logits are computed."""
    reached: float
    """Of the device's arithmetic."""


def _decode(case: Case, layout: Layout, held: Sequence[Holding]) -> Layer:
    """In a pipeline, as many parts of the batch as stages are under way, each in another stage."""
    batch = ceil(layout.sequences(case.demand.concurrency) / layout.stages)
    before = batch * case.demand.context
    work = _Pass(batch, before, before, batch, case.device.reach.decode)
    stage_s = max(_pass_s(case, each, work) for each in held)
    return _layer(case, layout, stage_s, batch, hidden=0.0)


def _prompt(case: Case, layout: Layout, held: Sequence[Holding], chunk: int) -> Layer:
    """A chunk in the middle of a prompt."""
    before = case.demand.prompt // 2
    work = _Pass(chunk, chunk * before, before, 1, case.device.reach.prompt)
    stage_s = max(_pass_s(case, each, work) for each in held)
    return _layer(case, layout, stage_s, chunk, HIDDEN)


def _layer(case: Case, layout: Layout, stage_s: float, tokens: int, hidden: float) -> Layer:
    """A layer of a step of `tokens` through all stages, of which the slowest computes `stage_s`. A share
    `hidden` of what computing could hide of its messages is hidden."""
    model, device = case.model, case.device
    row = model.hidden * (4 if device.kind == "cpu" else max(2, case.demand.weight_bytes))
    within = between = 0.0
    if layout.tp > 1:
        within = (2 * model.layers / layout.stages + 1) * message_s(device, layout.tp, tokens * row)
        within += message_s(device, layout.tp, _CANDIDATE_BYTES * tokens)
    if layout.stages > 1:
        latency_s, b_s = _link(device, layout.ranks)
        between = latency_s + tokens * row / b_s
    compute_s, communication_s = layout.stages * stage_s, layout.stages * (within + between)
    exposed_s = communication_s - hidden * min(compute_s, layout.stages * within)
    each = model.layers
    return Layer(layout.ranks, compute_s / each, communication_s / each, exposed_s / each, each)


def _pass_s(case: Case, held: Holding, work: _Pass) -> float:
    """Seconds a rank computes."""
    model, device, p, part = case.model, case.device, case.model.parameters, held.part
    share, feed, own = held.layers.size / model.layers, float(part.feed_forward), float(part.vocabulary)
    table = (p.head or p.embedding) * own if held.last else 0.0
    attention = float(p.attention * part.attention(model))
    used = p.experts * model.experts_used / model.experts if model.experts else 0.0
    touched = p.experts * model.touched(work.tokens)
    multiplied = share * (attention + (p.feed_forward + used) * feed)
    operations = 2.0 * (multiplied * work.tokens + table * work.drawn)
    operations += 4.0 * work.pairs * part.heads * (model.latent or model.head_dim) * held.layers.size
    weights = share * (attention + (p.feed_forward + touched) * feed) + table
    read = weights * case.demand.weight_bytes + kv_token_bytes(model, case.demand, held) * work.kv_tokens
    overhead_s = device.reach.step_s if held.first else 0.0
    compute_s = operations / (_rate(device, case.demand) * work.reached)
    return read / (device.read_b_s * device.reach.read) + compute_s + overhead_s


def _rate(device: Device, demand: Demand) -> float:
    if demand.dtype == "int8-dynamic":
        return device.flop8_s
    if demand.dtype == "float32" and device.kind != "cpu":
        return device.flop_s / _FLOAT32_TIMES
    return device.flop_s
