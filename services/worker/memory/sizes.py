"""What of a model decides over memory and time: its sizes, and its parameters counted exactly. Pure.

Sizes come from a config.json (`model_config.py`), from numbers a person gives, or are just a number of
parameters. Models that the engine cannot compute can be planned for all the same.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from services.worker.engine.config import ModelConfig
from services.worker.parallel.split import deal, plan_shards

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST_PARAMETERS = 10**15
_MOST_HIDDEN = 1 << 20


class BadModel(ValueError):
    """A model whose sizes cannot be read or cannot be; the message says where and what to do."""


@dataclass(frozen=True)
class Parameters:
    """How many there are of each kind. Those of `vectors` are kept by every rank, the others are split."""

    embedding: int = 0
    head: int = 0
    """0 where it is the embedding."""
    attention: int = 0
    """Of all layers, as the following."""
    feed_forward: int = 0
    """Of experts that every token passes, or of the only one there is."""
    experts: int = 0
    """Of all experts that some tokens pass."""
    vectors: int = 0
    """Norms, biases, positions, routers: what is small."""

    @property
    def total(self) -> int:
        return self.matrices + self.vectors

    @property
    def matrices(self) -> int:
        return self.embedding + self.head + self.attention + self.feed_forward + self.experts


@dataclass(frozen=True)
class ModelSizes:
    """Sizes are in elements, `max_len` in tokens. Satisfies `services.worker.parallel.split.Sizes`.

    Where only a number of parameters is known, `layers` is 0 and there is no KV to plan.
    """

    name: str
    parameters: Parameters
    layers: int = 0
    hidden: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0
    intermediate: int = 0
    """Of the only feed-forward part, or of one expert."""
    vocab_size: int = 0
    max_len: int | None = None
    """What the model was trained for; None: unknown."""
    tied: bool = True
    experts: int = 0
    experts_used: int = 0
    """By each token."""
    latent: int = 0
    """Elements a token keeps in a layer instead of keys and values of each head; every rank has them all."""
    config: ModelConfig | None = None
    """As the engine computes it; None: it cannot, for this `reason`."""
    reason: str = ""
    notes: tuple[str, ...] = ()
    """What was assumed or left out while counting."""

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def known(self) -> bool:
        """Whether more than a number of parameters is known."""
        return self.layers > 0

    def kv_elements(self, kv_heads: int | None = None) -> int:
        """Elements of a token's KV in all layers, with so many heads; None: those of the model."""
        if self.latent:
            return self.layers * self.latent
        return 2 * self.layers * (self.kv_heads if kv_heads is None else kv_heads) * self.head_dim

    @cached_property
    def per_token(self) -> int:
        """Parameters that a token is multiplied with: looking it up in the embedding is no multiplication."""
        p = self.parameters
        head = p.head or (p.embedding if self.tied else 0)
        used = p.experts * self.experts_used // self.experts if self.experts else 0
        return head + p.attention + p.feed_forward + used

    def touched(self, tokens: int) -> float:
        """Share of the experts that so many tokens of a step need, if each chooses by itself."""
        if not self.experts:
            return 1.0
        return float(1 - (1 - self.experts_used / self.experts) ** tokens)

    def parts(self, ranks: int) -> tuple["Part", ...]:
        """What each rank of a tensor-parallel group holds, split as the engine does.

        Raises ValueError, saying what is too small, where it cannot be.
        """
        if self.intermediate and self.vocab_size:
            return tuple(
                Part(
                    s.heads.size,
                    s.kv_heads.size,
                    Fraction(s.ffn.size, self.intermediate),
                    Fraction(s.vocab.size, self.vocab_size),
                )
                for s in plan_shards(self, ranks).shards
            )
        if not self.known:
            return (Part(1, 1, Fraction(1, ranks), Fraction(1, ranks)),) * ranks
        if ranks > self.heads > 1:
            raise ValueError(f"--tp {ranks}: only {self.heads} query heads for as many ranks; lower --tp")
        group = self.heads // self.kv_heads
        return tuple(
            Part(run.size, -(-run.stop // group) - run.start // group, Fraction(1, ranks), Fraction(1, ranks))
            for run in deal(self.heads, ranks)
        )


@dataclass(frozen=True)
class Part:
    """One rank's part of a model."""

    heads: int
    kv_heads: int
    feed_forward: Fraction
    """Share of the channels of feed-forward layers."""
    vocabulary: Fraction

    def attention(self, model: ModelSizes) -> Fraction:
        """Share of the attention's matrices."""
        if not model.known:
            return self.feed_forward
        return Fraction(self.heads + self.kv_heads, model.heads + model.kv_heads)


def sizes_of_parameters(count: int) -> ModelSizes:
    """A model of which nothing but the number of parameters is known."""
    return ModelSizes(
        name=f"{said(count)} parameters",
        parameters=Parameters(feed_forward=count),
        reason="only a number of parameters is known: name a model to serve",
        notes=("no KV and no activations: layers, hidden size and heads are unknown",),
    )


def sizes_of_numbers(
    layers: int, hidden: int, heads: int | None, kv_heads: int | None, parameters: int | None
) -> ModelSizes:
    """A model of which a person knows some sizes. Raises `BadModel` where they contradict each other."""
    notes = []
    if heads is None and 1 <= hidden <= _MOST_HIDDEN:
        heads = kv_heads or min(_divisors(hidden), key=lambda n: abs(n - hidden / 128))
        notes.append(f"{heads} heads, {_grouped(heads, kv_heads)}: no --heads were given")
    heads = heads or 1
    grouped = kv_heads or heads
    for what, value, most in (
        ("--layers", layers, 10_000),
        ("--hidden", hidden, _MOST_HIDDEN),
        ("--heads", heads, 1 << 16),
        ("--kv-heads", grouped, 1 << 16),
    ):
        if not 1 <= value <= most:
            raise BadModel(f"{what} {value}: from 1 to {most}")
    if hidden % heads:
        raise BadModel(f"--hidden {hidden} is not a multiple of --heads {heads}: heads have one size")
    if heads % grouped:
        raise BadModel(f"--kv-heads {grouped} must divide --heads {heads}")
    if parameters is None:
        parameters = 12 * layers * hidden * hidden
        notes.append(
            f"weights are estimated: 12 × {layers} layers × {hidden}² = {said(parameters)} parameters, "
            "without a vocabulary; give --params"
        )
    return ModelSizes(
        name=f"{layers} layers × {hidden}",
        parameters=Parameters(
            attention=parameters // 3, feed_forward=parameters - parameters // 3, vectors=0
        ),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=grouped,
        head_dim=hidden // heads,
        reason="only some of its sizes are known: name a model to serve",
        notes=tuple(notes),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _grouped(heads: int, kv_heads: int | None) -> str:
    return "none of which share keys and values" if kv_heads is None else f"{kv_heads} of keys and values"


def parse_count(text: str) -> int:
    """Parameters of e.g. `10B`, `135M`, `7.5e9`. Raises `BadModel`."""
    match = re.fullmatch(
        r"(\d{1,15}(?:\.\d{1,9})?(?:[eE]\d{1,2})?)\s*([KMBGT]?)", text.strip(), re.IGNORECASE
    )
    count = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not 1 <= count <= _MOST_PARAMETERS:
        raise BadModel(
            f"--params {text[:40]!r} is no number of parameters: write for example 135M, 10B or 7000000000"
        )
    return count


def said(count: int) -> str:
    """A number of parameters for people: `134.5M`, `10B`."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.4g}{name}"
    return str(count)
