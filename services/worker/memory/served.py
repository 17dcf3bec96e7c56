"""What a rank of our engine takes, computed as the engine allocates it (design §6). Pure.

Of CPUs with native kernels the numbers are those of the allocations themselves; `NativeDecoder` sizes its
memory by them. Of torch and of CUDA devices they follow from what a pass creates; libraries add to that what
they like.
"""

from dataclasses import dataclass, replace

from services.worker.engine.config import ModelConfig
from services.worker.memory.ledger import Ledger
from services.worker.parallel.split import Shard

PANEL = 16
ALIGN = 64
"""Pieces of an arena begin at multiples of this."""
LOGITS_KEPT = 256
"""Rows of logits that native kernels keep room for at most."""
CUDA_ROWS = 256
"""Rows of the largest captured decode step."""
FED_SLOTS = 4096
_KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TILE_QUERIES, _SEGMENT, _PIECES, _UNIT, _RUN, _SHARE = 96, 256, 16, 64, 16, 256
# Of attention_plan.h, attention.h and draw.h.


@dataclass(frozen=True)
class Format:
    """How matrices are kept. As `services.worker.engine.formats.FORMATS`, and bfloat16."""

    bytes: int
    scaled: bool = False
    """With a float32 scale for each output."""
    alignment: int = 1
    """Inputs are padded to a multiple of this by native kernels."""


FORMATS = {
    "float32": Format(4),
    "float16": Format(2),
    "bfloat16": Format(2),
    "int8": Format(1, scaled=True),
    "int8-dynamic": Format(1, scaled=True, alignment=64),
}


@dataclass(frozen=True)
class Load:
    """What a rank is to hold and to compute at most."""

    dtype: str
    kv_dtype: str
    blocks: int
    block_tokens: int
    kernels: str = "native"
    """`native`, `torch`, or `cuda`."""
    step_tokens: int = 2048
    slots: int = 64
    threads: int = 1
    runtime_bytes: int = 0
    staging_bytes: int = 0


def predict_rank(config: ModelConfig, shard: Shard, load: Load) -> Ledger:
    """The ledger of the rank that holds `shard` of the model `config`. Raises ValueError for formats that are
    none."""
    own = own_config(config, shard, filled=load.kernels != "native")
    weights, activations, scratch = {
        "native": _native,
        "torch": _torch,
        "cuda": _cuda,
    }[load.kernels](own, shard, load)
    return Ledger(
        runtime_bytes=load.runtime_bytes,
        weights_bytes=weights,
        kv_bytes=load.blocks * kv_block_bytes(config, shard.kv_heads.size, load.kv_dtype, load.block_tokens),
        activation_bytes=activations,
        workspace_bytes=scratch + message_bytes(config, shard.size, load.step_tokens),
        staging_bytes=load.staging_bytes,
    )


def kv_block_bytes(config: ModelConfig, kv_heads: int, kv_dtype: str, block_tokens: int) -> int:
    """Of a block with so many KV heads."""
    if kv_dtype not in _KV_BYTES:
        raise ValueError(f"--kv-dtype {kv_dtype}: choose one of {', '.join(_KV_BYTES)}")
    return 2 * config.layers * kv_heads * config.head_dim * _KV_BYTES[kv_dtype] * block_tokens


def own_config(config: ModelConfig, shard: Shard, filled: bool) -> ModelConfig:
    """`config` with the numbers of heads, channels and rows that the rank's matrices have."""
    heads = max(shard.groups) * len(shard.groups) if filled else sum(shard.groups)
    return replace(
        config,
        heads=heads,
        kv_heads=shard.kv_heads.size,
        intermediate=shard.ffn.size,
        vocab_size=shard.vocab.size,
        out_bias=config.out_bias and shard.rank == 0,
    )


def weight_format(dtype: str) -> Format:
    if dtype not in FORMATS:
        raise ValueError(f"--dtype {dtype}: choose one of {', '.join(FORMATS)}")
    return FORMATS[dtype]


def native_weight_bytes(c: ModelConfig, dtype: str) -> int:
    """The arena of a `NativeDecoder`: matrices in the kernels' layout with their biases and scales, norms,
    rotary tables. `c` has the rank's own numbers."""
    sizes: list[int] = []

    def matrix(n: int, k: int, bias: bool = False) -> None:
        sizes.append(native_matrix_bytes(n, k, dtype, bias))

    for _ in range(c.layers):
        matrix(c.q_size + 2 * c.kv_size, c.hidden, c.qkv_bias)
        matrix(c.hidden, c.q_size, c.out_bias)
        matrix(2 * _up(c.intermediate), c.hidden)
        matrix(c.hidden, c.intermediate)
        sizes += [4 * c.hidden] * 2 + [4 * c.head_dim] * (2 * c.qk_norm)
    for _ in range(1 if c.tied else 2):
        matrix(c.vocab_size, c.hidden)
    sizes += [4 * c.hidden, *[4 * c.max_len * c.head_dim // 2] * 2]
    return sum(_up(size, ALIGN) for size in sizes)


def native_matrix_bytes(n: int, k: int, dtype: str, bias: bool) -> int:
    """Of weights [n, k] packed, with what they have for each output."""
    form = weight_format(dtype)
    outputs = _up(4 * _up(n), ALIGN)
    return _up(_up(n) * _up(k, form.alignment) * form.bytes, ALIGN) + outputs * (bias + form.scaled)


def native_buffer_bytes(c: ModelConfig, dtype: str, tokens: int, logits: int) -> int:
    """The arena of a `NativeDecoder` for steps of `tokens` tokens and logits of `logits` of them."""
    sizes = [4 * tokens * width for width in native_widths(c)]
    if weight_format(dtype).alignment > 1:
        groups = _up(max(native_widths(c)), 64) // 64
        sizes += [tokens * groups * 96, 4 * tokens * groups]
    sizes.append(4 * logits * _up(c.vocab_size))
    return sum(_up(size, ALIGN) for size in sizes)


def native_widths(c: ModelConfig) -> tuple[int, ...]:
    """Floats of a token in x, normed, qkv, attended, act."""
    return c.hidden, c.hidden, c.q_size + 2 * c.kv_size, c.q_size, _up(c.intermediate)


def native_scratch_bytes(c: ModelConfig, shard: Shard, load: Load) -> int:
    """What a team keeps for attention: each thread its own, all together the states of long attention that is
    cut into pieces, of the step that has most of them."""
    group = max(shard.groups)
    queries = max(1, _TILE_QUERIES // group) * group
    attention = queries * (c.head_dim + _UNIT) + 2 * _RUN * c.head_dim + 2 * queries * (c.head_dim + 2)
    return load.threads * 4 * (attention + 16) + state_bytes(c, shard, load)


def state_bytes(c: ModelConfig, shard: Shard, load: Load) -> int:
    """Of the tiles of `longest_attention`, whose segments all leave a state."""
    if load.threads == 1:
        return 0
    tokens = longest_attention(c, shard, load)
    states = 0
    for group in shard.groups:
        height = max(1, _TILE_QUERIES // group)
        for first in range(0, tokens, height):
            count = min(height, tokens - first)
            segments = -(-(c.max_len - tokens + first + count) // _SEGMENT)
            states += segments * count * group * (c.head_dim + 2)
    return 4 * states


def longest_attention(c: ModelConfig, shard: Shard, load: Load) -> int:
    """Tokens at the end of the longest sequence whose attention is still cut: as many tiles as pieces."""
    height = max(1, _TILE_QUERIES // max(shard.groups))
    tiles = max(1, load.threads * _PIECES // (len(shard.groups) + 1))
    return max(1, min(tiles * height, load.step_tokens, c.max_len // 2))


def message_bytes(config: ModelConfig, ranks: int, step_tokens: int) -> int:
    """Of a rank's room for messages to others; `services.worker.group.membership.most_floats` of them, twice,
    as messages are whole."""
    if ranks == 1:
        return 0
    return 2 * 4 * max(1 << 18, 2 * config.hidden * step_tokens) + 4 * 32768


def _native(c: ModelConfig, shard: Shard, load: Load) -> tuple[int, int, int]:
    logits = min(load.slots, load.step_tokens)
    buffers = native_buffer_bytes(c, load.dtype, load.step_tokens, logits)
    weights = native_weight_bytes(c, load.dtype)
    activations = buffers + _sampling_bytes(c, shard, logits, load.threads)
    return weights, activations, native_scratch_bytes(c, shard, load)


def _sampling_bytes(c: ModelConfig, shard: Shard, rows: int, threads: int) -> int:
    """Log-probabilities of all rows and the logits that they are made of, chosen from the step's; what each
    thread needs to draw. Ranks of a group tell each other what they found instead."""
    if not shard.whole:
        return 0
    return 4 * (2 * rows * c.vocab_size + threads * 2 * _up(c.vocab_size, _SHARE))


def _matrices(c: ModelConfig) -> int:
    return c.layers * (c.hidden * (2 * c.q_size + 2 * c.kv_size) + 3 * c.hidden * c.intermediate)


def _vectors(c: ModelConfig) -> int:
    """Bytes of norms, biases and rotary tables, float32."""
    layer = 2 * c.hidden + 2 * c.head_dim * c.qk_norm
    layer += (c.q_size + 2 * c.kv_size) * c.qkv_bias + c.hidden * c.out_bias
    return 4 * (c.layers * layer + c.hidden + c.max_len * c.head_dim)


def _torch(c: ModelConfig, shard: Shard, load: Load) -> tuple[int, int, int]:
    form, table = weight_format(load.dtype), c.vocab_size * c.hidden
    # The embedding is looked up in float32, the head multiplied with in the format; one if it is float32.
    tables = 4 * table if load.dtype == "float32" and c.tied else 4 * table + form.bytes * table
    weights = form.bytes * _matrices(c) + tables + _vectors(c)
    tokens, logits = load.step_tokens, min(load.slots, load.step_tokens)
    mask = tokens * c.group * c.max_len
    longest = 2 * 4 * c.kv_size * c.max_len
    wide = 4 * tokens * (2 * c.hidden + 4 * c.intermediate)
    wide += 4 * max(table, 2 * c.hidden * c.intermediate) if form.scaled else 0  # int8 is widened to multiply
    return weights, max(wide, mask + longest + 4 * tokens * 4 * c.q_size) + 3 * 4 * logits * c.vocab_size, 0


def _cuda(c: ModelConfig, shard: Shard, load: Load) -> tuple[int, int, int]:
    form, table = weight_format(load.dtype), c.vocab_size * c.hidden
    weights = form.bytes * (_matrices(c) + table * (1 if c.tied else 2)) + _vectors(c)
    tokens = load.step_tokens
    feed = tokens * (4 * c.hidden + form.bytes * (c.hidden + 4 * c.intermediate))
    attend = tokens * (4 * c.hidden + (form.bytes + 8) * (2 * c.q_size + 2 * c.kv_size))
    kept = 4 * CUDA_ROWS * c.vocab_size + 8 * FED_SLOTS
    logits = 3 * 4 * min(load.slots, tokens) * c.vocab_size
    return weights, max(feed, attend) + logits + kept, 0


def _up(n: int, step: int = PANEL) -> int:
    return -(-n // step) * step
