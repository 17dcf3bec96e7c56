"""`hortator plan`: what memory a model takes on which devices, how to use them, and what that would do."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from deploy.plan_inputs import Numbers
from deploy.plan_request import MOST_TOKENS, Asked, planned, up_command
from services.worker.memory.devices import BadDevice
from services.worker.memory.sizes import BadModel
from shared.model import ModelError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

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
            min=0, max=MOST_TOKENS, help="Tokens of each, prompt and output; 0: 2048, or the model's."
        ),
    ] = 0,
    output: Annotated[
        int,
        typer.Option(min=0, max=MOST_TOKENS, help="Tokens of the context that are generated; 0: a fifth."),
    ] = 0,
    reserved: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_TOKENS,
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
        float,
        typer.Option(min=0.001, max=1e9, help="A step may take so long; 250: as the scheduler is set up."),
    ] = 250.0,
    link_gb_s: Annotated[
        float, typer.Option(min=0, max=1e9, help="Between devices, each way; 0: as the device's.")
    ] = 0.0,
    link_us: Annotated[
        float, typer.Option(min=0, max=1e9, help="A message's latency there; 0: as the device's.")
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
    asked = Asked(
        model=model,
        numbers=Numbers(params, layers, hidden, heads, kv_heads),
        device=device,
        count=count,
        concurrency=concurrency,
        context=context,
        output=output,
        reserved=reserved,
        dtype=dtype,
        kv_dtype="" if kv_dtype == "auto" else kv_dtype,
        tp=tp,
        block_tokens=block_tokens,
        gap_ms=gap_ms,
        link_gb_s=link_gb_s,
        link_us=link_us,
    )
    try:
        if picture is not None:
            _check_picture(picture)
        made = planned(asked)
        if picture is not None:
            from deploy.plan_picture import draw

            draw(made, picture)
    except (BadModel, BadDevice, ModelError, ValueError, OSError) as error:
        _fail(str(error))
    command = up_command(asked, made)
    if as_json:
        print(json.dumps(made.as_dict() | {"command": command}, indent=1))
    else:
        from deploy.plan_text import show

        show(made, command)


def _check_picture(picture: Path) -> None:
    if picture.suffix.lower() not in _PICTURES:
        raise BadModel(f"--picture {picture}: name a file that ends with {' or '.join(_PICTURES)}")
    if not picture.parent.is_dir():
        raise BadModel(f"--picture {picture}: there is no folder {picture.parent}")


def _fail(reason: str) -> NoReturn:
    print(f"hortator plan: {reason}", file=sys.stderr)
    raise typer.Exit(1)
