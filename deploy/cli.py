"""The console script `hortator`.

`hortator gateway|scheduler|worker|kvstore` runs one service from environment settings, in whatever
environment holds that service's extra alone: nothing but the standard library is imported before.
Everything else is the operator's command line and needs the `local` extra.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import typer

SERVICES = ("gateway", "scheduler", "worker", "kvstore")

_FORWARDED = {
    "chat": ("deploy.chat", "Talk to the model in the terminal."),
    "model": ("deploy.model_cli", "Pull, list, verify and import models."),
    "bench": ("deploy.bench.cli", "Measure any OpenAI-compatible server: closed loop, open loop, traces."),
    "plan": ("deploy.plan", "Plan memory and devices for a model, before anything is started."),
    "profile": ("deploy.profile", "Measure where the time of an engine step goes."),
}
"""Command → module with a typer `app`, imported when the command is used."""


def main() -> None:
    """Entry point; ends the process with the command's exit status."""
    args = sys.argv[1:]
    try:
        if args and args[0] in SERVICES:
            _run_service(args[0], args[1:])
        elif args == ["--version"]:
            print(f"hortator {metadata.version('hortator')}")
        else:
            _run_command(args)
    except BrokenPipeError:  # `hortator gateway --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run_command(args: list[str]) -> None:
    try:
        app = _build()
    except ModuleNotFoundError as error:
        if error.name == "typer" and args in ([], ["--help"]):
            print(_bare_help())
            return
        _missing(error)
    app(prog_name="hortator")


def _bare_help() -> str:
    """Where only services are installed."""
    known = "\n".join(f"  hortator {name} [--help]" for name in SERVICES)
    return (
        f"Services of this installation, each run in the foreground from HORTATOR_* settings:\n\n{known}\n\n"
        "Each needs the extra of its own name. The rest of the command line (up, down, status, tap, chat, "
        f"model, bench, plan, profile) comes with the extra `local`: {_install('local')}"
    )


def _run_service(name: str, rest: list[str]) -> None:
    """Run one service. Its settings are all it reads; `--help` lists them."""
    from shared.runtime.settings import CannotStart

    try:
        if rest in (["--help"], ["-h"]):
            from deploy.service_help import settings_help

            settings = importlib.import_module(f"services.{name}.settings")
            print(f"hortator {name} runs in the foreground and reads these environment variables:\n")
            print(settings_help(getattr(settings, f"{name.capitalize()}Settings")))
            return
        if rest:
            sys.exit(f"hortator {name} takes no arguments but --help: it reads HORTATOR_* variables")
        importlib.import_module(f"services.{name}.__main__").main()
    except ModuleNotFoundError as error:
        _missing(error, name)
    except CannotStart as error:
        sys.exit(f"hortator {name}: {error}")


def _missing(error: ModuleNotFoundError, extra: str = "local") -> NoReturn:
    if (error.name or "").split(".")[0] in ("services", "shared", "deploy"):
        raise error  # a file of ours is missing: no extra brings it
    sys.exit(f"hortator: {error.name} is not installed: {_install(extra)}")


def _install(extra: str) -> str:
    """The command that brings an extra, from where this installation came from."""
    try:
        origin = json.loads(metadata.distribution("hortator").read_text("direct_url.json") or "{}").get(
            "url", ""
        )
    except (metadata.PackageNotFoundError, ValueError):
        origin = ""
    if not origin.startswith("file://"):
        return f"pip install 'hortator[{extra}]'"
    folder = Path(unquote(urlsplit(origin).path))
    return f"pip install '{'.' if folder == Path.cwd() else folder}[{extra}]'"


def _build() -> "typer.Typer":
    import typer

    from deploy.rundir import default_run_dir

    app = typer.Typer(
        help="Distributed LLM inference as a mesh of services over NATS and Redis.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    RunDirOption = Annotated[
        Path, typer.Option("--run-dir", help="Where this mesh keeps its pids, credentials and logs.")
    ]
    here = default_run_dir(dict(os.environ))

    @app.callback(invoke_without_command=True)
    def of_all(
        version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    ) -> None:
        if version:
            print(f"hortator {metadata.version('hortator')}")
            raise typer.Exit

    @app.command()
    def up(
        model: Annotated[
            str, typer.Option(help="A name (smol), org/name on the hub, a Hugging Face folder, a .gguf file.")
        ] = "smollm2-135m-instruct",
        instances: Annotated[int, typer.Option(min=1, max=64, help="Model replicas.")] = 1,
        dtype: Annotated[
            Literal["float32", "float16", "bfloat16", "int8", "int8-dynamic"],
            typer.Option(help="Weights in memory; bfloat16 on CUDA only, int8 on CPUs only."),
        ] = "float16",
        kv_dtype: Annotated[
            Literal["auto", "float32", "float16", "bfloat16"],
            typer.Option(help="KV cache; auto: on CPUs float16, but float32 for float32 weights."),
        ] = "auto",
        kv_memory: Annotated[
            str, typer.Option(help="Memory for KV of each instance; auto: what all else leaves.")
        ] = "512MiB",
        tier_memory: Annotated[
            str, typer.Option(help="Memory where blocks go that instances have no room for; 0: none.")
        ] = "512MiB",
        tier_disk: Annotated[
            str, typer.Option(help="Disk, in the run directory, where blocks go from that memory; 0: none.")
        ] = "0",
        http: Annotated[
            str, typer.Option(metavar="HOST:PORT", help="Address of the API; port 0: any free one.")
        ] = ("127.0.0.1:8000"),
        run_dir: RunDirOption = here,
        api_key_file: Annotated[
            Path | None, typer.Option(help="Keys that clients must send: lines `KEY [TENANT]`, # comments.")
        ] = None,
        detach: Annotated[
            bool, typer.Option("--detach", help="Return once ready; stop with `hortator down`.")
        ] = False,
        mock: Annotated[
            bool, typer.Option("--mock", help="Workers without model mathematics: answers are random words.")
        ] = False,
        max_slots: Annotated[int, typer.Option(min=0, help="Sequences at once per instance; 0: chosen.")] = 0,
        policy: Annotated[Literal["continuous", "static"], typer.Option(help="Batching.")] = "continuous",
        reservation: Annotated[
            Literal["expected", "max"], typer.Option(help="KV reserved at admission.")
        ] = "expected",
        threads: Annotated[
            int, typer.Option(min=0, help="Compute threads per rank; 0: what measures best.")
        ] = 0,
        kernels: Annotated[
            Literal["auto", "native", "torch"], typer.Option(help="auto: whichever measures faster.")
        ] = "auto",
        deterministic: Annotated[
            bool,
            typer.Option("--deterministic", help="Same request, same tokens, whatever else is computed."),
        ] = False,
        device: Annotated[
            str, typer.Option(help="cuda, or cuda:0,cuda:1 for instances or ranks; empty: the CPU.")
        ] = "",
        tp: Annotated[
            int, typer.Option(min=1, max=64, help="Ranks of each instance: processes that share its work.")
        ] = 1,
        nodes: Annotated[int, typer.Option(min=1, help="Machines its ranks are spread over.")] = 1,
        node_rank: Annotated[
            int, typer.Option(min=0, help="Which of them this is; all but 0 run nothing but ranks.")
        ] = 0,
        rendezvous: Annotated[
            str, typer.Option(metavar="HOST:PORT", help="Of node 0, where ranks of several nodes meet.")
        ] = "",
        group_secret_file: Annotated[
            Path | None, typer.Option(help="A secret that all nodes have, in the first line.")
        ] = None,
        log_level: Annotated[
            Literal["debug", "info", "warning", "error"], typer.Option(help="Of the services.")
        ] = "info",
        set_: Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="SERVICE.FIELD=VALUE", help="A further setting of a service; repeat it."
            ),
        ] = None,
    ) -> None:
        """Start NATS, Redis, kvstore, scheduler, workers and gateway on this machine."""
        from deploy import up as command
        from deploy.options import UpOptions

        options = UpOptions(
            run_dir=run_dir.expanduser().absolute(),
            model=model,
            instances=instances,
            dtype=dtype,
            kv_dtype="" if kv_dtype == "auto" else kv_dtype,
            kv_memory=kv_memory,
            tier_memory=tier_memory,
            tier_disk=tier_disk,
            http=http,
            api_key_file=api_key_file,
            mock=mock,
            max_slots=max_slots,
            policy=policy,
            reservation=reservation,
            threads=threads,
            kernels=kernels,
            deterministic=deterministic,
            device=device,
            tp=tp,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            group_secret_file=group_secret_file,
            log_level=log_level,
            set=tuple(set_ or ()),
        )
        sys.exit(command.up(options, detach=detach))

    @app.command()
    def down(
        run_dir: RunDirOption = here,
        grace_s: Annotated[float, typer.Option(min=0, help="Patience before processes are killed.")] = 45.0,
    ) -> None:
        """Stop a mesh, whatever is left of it."""
        from deploy import down as command

        sys.exit(command.down(run_dir, grace_s))

    @app.command()
    def status(
        json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
        run_dir: RunDirOption = here,
    ) -> None:
        """Show a mesh's services and instances."""
        from deploy import status as command

        sys.exit(command.show(run_dir, as_json=json))

    @app.command()
    def tap(
        subject: Annotated[
            str, typer.Argument(help="NATS subject; `*` and `>` are wildcards.")
        ] = "hortator.>",
        run_dir: RunDirOption = here,
        count: Annotated[int, typer.Option(min=0, help="End after so many frames; 0: never.")] = 0,
    ) -> None:
        """Print frames as they pass, one JSON object a line, decoded without the schema."""
        from deploy import tap as command

        sys.exit(command.tap(run_dir, subject, count))

    for name, (module, text) in _FORWARDED.items():
        app.command(
            name,
            help=text,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_forwarder(name, module))

    for name in SERVICES:
        app.command(name, help="Run this service in the foreground, from HORTATOR_* settings.")(lambda: None)
    return app


def _forwarder(name: str, module: str) -> Callable[[Any], None]:
    import typer

    def forward(ctx: typer.Context) -> None:
        try:
            target = importlib.import_module(module).app
        except ModuleNotFoundError as error:
            _missing(error)
        target(ctx.args, prog_name=f"hortator {name}")

    return forward


if __name__ == "__main__":
    main()
