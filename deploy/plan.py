"""`hortator plan`: what memory a model takes on which devices, how to use them, and what that would do."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from deploy.plan_inputs import device_named, model_named, model_of_numbers
from services.worker.memory.devices import BadDevice
from services.worker.memory.footprint import KV_BYTES, Demand
from services.worker.memory.plan import make_plan
from services.worker.memory.sizes import BadModel, ModelSizes
from services.worker.settings import WorkerSettings, default_kv
from shared.model import ModelError
from shared.runtime.settings import parse_size

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MOST_TOKENS = 1 << 24
_OUTPUT_SHARE = 5
"""Where --output is not given, one token in so many is generated."""
_PICTURES = (".png", ".svg")


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(help="A name (smol), org/name on the hub, a model folder, a config.json, a .gguf file."),
    ] = "",
    params: Annotated[
        str, typer.Option(metavar="COUNT", help="Instead of a model, its number of parameters, e.g. 10B.")
    ] = "",
    layers: Annotated[
        int, typer.Option(min=0, help="With --hidden, instead of a model: to know its KV.")
    ] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="Hidden size.")] = 0,
    heads: Annotated[int, typer.Option(min=0, help="Query heads.")] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, help="KV heads; 0: as many as query heads.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            help="cpu: this machine; measured: measure it first; H200, L4, …; or a .json file of one."
        ),
    ] = "cpu",
    count: Annotated[int, typer.Option(min=1, max=1024, help="How many such devices there are.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1_000_000, help="Sequences at once.")] = 32,
    context: Annotated[
        int,
        typer.Option(
            min=0, max=_MOST_TOKENS, help="Tokens of each, prompt and output; 0: 2048, or the model's."
        ),
    ] = 0,
    output: Annotated[
        int,
        typer.Option(min=0, max=_MOST_TOKENS, help="Tokens of the context that are generated; 0: a fifth."),
    ] = 0,
    reserved: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_TOKENS,
            help="Tokens set aside for each sequence, as without paging; 0: what it uses.",
        ),
    ] = 0,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8", "int8-dynamic"], typer.Option(help="Of weights.")
    ] = "float16",
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="Of KV; auto: as `hortator up` has it."),
    ] = "auto",
    tp: Annotated[int, typer.Option(min=0, max=1024, help="Ranks of an instance; 0: compare.")] = 0,
    block_tokens: Annotated[int, typer.Option(min=0, max=4096, help="Of a KV block; 0: by cost.")] = 0,
    gap_ms: Annotated[
        float, typer.Option(min=0.001, help="A step may take so long; 250: as the scheduler is set up.")
    ] = 250.0,
    link_gb_s: Annotated[
        float, typer.Option(min=0, help="Between devices, each way; 0: as the device's.")
    ] = 0.0,
    link_us: Annotated[
        float, typer.Option(min=0, help="A message's latency there; 0: as the device's.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw every option's memory into this .png or .svg.")
    ] = None,
) -> None:
    """Say what memory a model takes, whether it fits, and how to use the devices, before anything is started.

    Nothing is loaded, and nothing downloaded but a config.json. Figures are predictions; what they rest on is
    said at the end.
    """
    try:
        if picture is not None:
            _check_picture(picture)
        sizes = _sizes(model, params, layers, hidden, heads, kv_heads, context)
        found = device_named(device).linked(link_gb_s or None, link_us or None)
        demand = _demand(
            sizes, found.kind, concurrency, context, output, reserved, dtype, kv_dtype, block_tokens
        )
        if tp > count and found.kind == "cpu" and count == 1:
            found, count = found.shared_by(tp), tp
        if tp > count:
            raise BadDevice(f"--tp {tp}: only --count {count} devices for as many ranks")
        made = make_plan(sizes, found, demand, count, gap_ms / 1e3, tp)
    except (BadModel, BadDevice, ModelError, ValueError) as error:
        _fail(str(error))
    if picture is not None:
        from deploy.plan_picture import draw

        draw(made, picture)
    if as_json:
        print(json.dumps(made.as_dict(), indent=1, ensure_ascii=False))
    else:
        from deploy.plan_text import show

        show(made)


def _sizes(
    model: str, params: str, layers: int, hidden: int, heads: int, kv_heads: int, context: int
) -> ModelSizes:
    numbers = bool(params or layers or hidden or heads or kv_heads)
    if model and numbers:
        raise BadModel(
            "--model says all sizes: leave --params, --layers, --hidden, --heads and --kv-heads out"
        )
    if numbers:
        return model_of_numbers(params, layers, hidden, heads, kv_heads)
    return model_named(model or "smollm2-135m-instruct", context or None)


def _demand(
    sizes: ModelSizes,
    kind: str,
    concurrency: int,
    context: int,
    output: int,
    reserved: int,
    dtype: str,
    kv_dtype: str,
    block_tokens: int,
) -> Demand:
    most = sizes.max_len or _MOST_TOKENS
    if context > most:
        raise BadModel(
            f"--context {context}: the model was trained for {most} tokens (max_position_embeddings)"
        )
    context = context or min(2048, most)
    if output >= max(context, 2):
        raise BadModel(f"--output {output}: of --context {context} tokens at least one is the prompt's")
    if reserved and reserved < context:
        raise BadModel(f"--reserved {reserved}: less than the --context {context} that a sequence uses")
    return Demand(
        concurrency=concurrency,
        context=context,
        output=output or max(1, context // _OUTPUT_SHARE),
        dtype=dtype,
        kv_dtype=_kv_dtype(dtype, kind) if kv_dtype == "auto" else kv_dtype,
        reserved=reserved,
        block_tokens=block_tokens,
        # Of a GPU it lies in the memory of its host.
        staging_bytes=parse_size("tier_staging", WorkerSettings.tier_staging) if kind == "cpu" else 0,
    )


def _kv_dtype(dtype: str, kind: str) -> str:
    """As the worker chooses; beside int8 weights of GPUs, which it does not serve, at 16 bit."""
    chosen = default_kv(dtype, kind)
    return chosen if chosen in KV_BYTES else "float16"


def _check_picture(picture: Path) -> None:
    if picture.suffix.lower() not in _PICTURES:
        raise BadModel(f"--picture {picture}: name a file that ends with {' or '.join(_PICTURES)}")
    if not picture.parent.is_dir():
        raise BadModel(f"--picture {picture}: there is no folder {picture.parent}")


def _fail(reason: str) -> NoReturn:
    print(f"hortator plan: {reason}", file=sys.stderr)
    raise typer.Exit(1)
