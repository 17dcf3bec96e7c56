"""What `hortator plan` is asked, checked, and the plan of it."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from deploy.plan_inputs import Numbers, device_named, model_named, model_of_numbers
from services.worker.memory.devices import BadDevice
from services.worker.memory.footprint import KV_BYTES, Case, Demand
from services.worker.memory.plan import Plan, make_plan
from services.worker.memory.sizes import BadModel, ModelSizes
from services.worker.settings import WorkerSettings, default_kv
from shared.runtime.settings import parse_size

MOST_TOKENS = 1 << 24
_DEFAULT_MODEL = "smollm2-135m-instruct"
_CONTEXT = 2048
_OUTPUT_SHARE = 5
"""Where nothing is said, one token in so many is generated."""


@dataclass(frozen=True)
class Asked:
    """Options of the command; 0 and empty: not given."""

    model: str
    numbers: Numbers
    device: str
    count: int
    concurrency: int
    context: int
    output: int
    reserved: int
    dtype: str
    kv_dtype: str
    tp: int
    block_tokens: int
    gap_ms: float
    link_gb_s: float
    link_us: float


def planned(asked: Asked) -> Plan:
    """The plan. Raises `BadModel`, `BadDevice`, `shared.model.ModelError`, and ValueError for a model that
    cannot be split into `tp`."""
    sizes = _sizes(asked)
    device = device_named(asked.device).linked(asked.link_gb_s or None, asked.link_us or None)
    count = asked.count
    if asked.tp > count == 1 and device.kind == "cpu":
        device, count = device.shared_by(asked.tp), asked.tp
    if asked.tp > count:
        raise BadDevice(f"--tp {asked.tp}: only --count {count} devices for as many ranks")
    return make_plan(Case(sizes, device, _demand(asked, sizes, device.kind), count), asked.tp)


def _sizes(asked: Asked) -> ModelSizes:
    if asked.model and asked.numbers.given:
        raise BadModel(
            "--model says all sizes: leave --params, --layers, --hidden, --heads and --kv-heads out"
        )
    if asked.numbers.given:
        return model_of_numbers(asked.numbers)
    return model_named(asked.model or _DEFAULT_MODEL, asked.context or None)


def _demand(asked: Asked, sizes: ModelSizes, kind: str) -> Demand:
    most = sizes.max_len or MOST_TOKENS
    if asked.context > most:
        raise BadModel(
            f"--context {asked.context}: the model was trained for {most} tokens (max_position_embeddings)"
        )
    context = asked.context or min(_CONTEXT, most)
    if asked.output >= max(context, 2):
        raise BadModel(f"--output {asked.output}: of --context {context} tokens at least one is the prompt's")
    if asked.reserved and asked.reserved < context:
        raise BadModel(f"--reserved {asked.reserved}: less than the --context {context} that a sequence uses")
    return Demand(
        concurrency=asked.concurrency,
        context=context,
        output=asked.output or max(1, context // _OUTPUT_SHARE),
        dtype=asked.dtype,
        kv_dtype=asked.kv_dtype or _kv_dtype(asked.dtype, kind),
        reserved=asked.reserved,
        block_tokens=asked.block_tokens,
        # Of a GPU it lies in the memory of its host.
        staging_bytes=parse_size("tier_staging", WorkerSettings.tier_staging) if kind == "cpu" else 0,
        gap_s=asked.gap_ms / 1e3,
    )


def _kv_dtype(dtype: str, kind: str) -> str:
    """As the worker chooses; beside int8 weights of GPUs, which it does not serve, at 16 bit."""
    chosen = default_kv(dtype, kind)
    return chosen if chosen in KV_BYTES else "float16"


def up_command(asked: Asked, plan: Plan) -> str | None:
    """The command that starts what is recommended, or None where it cannot be started."""
    option, device = plan.recommendation.option, plan.device
    cuda = device.kind == "cuda"
    if option is None or plan.model.config is None or device.kind not in ("cpu", "cuda"):
        return None
    layout = option.layout
    if (cuda and asked.dtype.startswith("int8")) or (not cuda and layout.devices > device.island):
        return None
    named = Path(asked.model or _DEFAULT_MODEL)
    model = str(named.parent if named.suffix == ".json" else named)
    kv_mib = -(-sum(ledger.kv_bytes for ledger in option.ranks) // (1 << 20))
    parts = ["hortator up", f"--model {shlex.quote(model)}", f"--dtype {asked.dtype}"]
    parts += [f"--kv-dtype {asked.kv_dtype}"] if asked.kv_dtype else []
    parts += [f"--kv-memory {kv_mib}MiB", f"--max-slots {layout.sequences(asked.concurrency)}"]
    parts += [f"--tp {layout.tp}"] if layout.tp > 1 else []
    parts += [f"--instances {layout.replicas}"] if layout.replicas > 1 else []
    tokens = plan.block.chosen.block_tokens if plan.block else 0
    parts += [f"--set worker.block_tokens={tokens}"] if WorkerSettings.block_tokens not in (0, tokens) else []
    parts += ["--device " + ",".join(f"cuda:{i}" for i in range(layout.devices))] if cuda else []
    return " ".join(parts)
