"""A plan for people: what is asked, the ledger, the arithmetic, the options, what to do, what it rests on."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.worker.memory.ledger import Ledger
from services.worker.memory.options import COMFORT, Option
from services.worker.memory.plan import Plan, named
from services.worker.memory.recommend import gb, ms
from services.worker.memory.sizes import said

_WIDTH = 116
_KINDS_SHOWN = 4
_UNKNOWN = ("KV", "activations", "workspace")
"""Classes nothing can be said of where only a number of parameters is known."""


def show(plan: Plan, command: str | None) -> None:
    """On the terminal; a fixed width where the output is none. `command` starts what is recommended."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False)
    _head(console, plan)
    console.print(_ledger(plan))
    console.print("[bold]arithmetic[/bold]")
    _list(console, plan.arithmetic())
    console.print()
    console.print(_options(plan))
    _advice(console, plan, command)
    console.print("[bold]what this rests on[/bold]")
    _list(console, plan.assumptions())


def _head(console: Console, plan: Plan) -> None:
    m, d, demand = plan.model, plan.device, plan.demand
    shape = f", {m.layers} layers, {m.heads} heads on {m.kv_heads} of KV" if m.known else ""
    known = m.parameters.total
    console.print(f"[bold]{_plain(m.name)}[/bold]: {known:,} parameters ({said(known)}){shape}")
    reserved = f", {demand.reserved:,} reserved for each" if demand.reserved else ""
    console.print(
        f"{demand.concurrency:,} sequences of {demand.context:,} tokens, {demand.output:,} of them generated"
        f"{reserved}; weights {demand.dtype}, KV {demand.kv_dtype}",
        markup=False,
    )
    times = f"{plan.case.count} × " if plan.case.count > 1 else ""
    console.print(f"on {times}{d.name} with {gb(d.memory_bytes)}{' each' * bool(times)}", markup=False)
    console.print()


def _list(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Padding(Text(f"- {line}"), (0, 0, 0, 2)))


def _ledger(plan: Plan) -> Table:
    """Classes as rows; ranks as columns, those that take the same as one, and all together."""
    option = plan.planned
    layout = option.layout
    table = Table(
        title=f"memory: {layout}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_footer=True,
    )
    ranks = _alike(option)
    table.add_column("class", footer="of the device", no_wrap=True)
    for heading, ledger in ranks.items():
        used = ledger.total_bytes / option.memory_bytes
        table.add_column(heading, footer=f"{used:.1%}", justify="right")
    if layout.devices > 1:
        table.add_column(f"all {layout.devices} ranks", justify="right")
    columns = [named(ledger) for ledger in ranks.values()]
    if layout.devices > 1:
        columns.append(named(option.total))
    unknown = () if plan.model.known else _UNKNOWN
    for row in zip(*columns):
        name = row[0][0]
        table.add_row(name, *("?" if name in unknown else gb(size) for _, size in row))
    table.add_section()
    totals = [*ranks.values(), *([option.total] if layout.devices > 1 else [])]
    table.add_row("total", *(gb(ledger.total_bytes) for ledger in totals), style="bold")
    return table


def _alike(option: Option) -> dict[str, Ledger]:
    """Heading → ledger of the ranks that take the same; of many kinds the fullest and the emptiest."""
    kinds: dict[Ledger, list[int]] = {}
    for rank, ledger in enumerate(option.ranks):
        kinds.setdefault(ledger, []).append(rank)
    shown = list(kinds)
    if len(shown) > _KINDS_SHOWN:
        shown.sort(key=lambda ledger: ledger.total_bytes)
        shown = [shown[-1], shown[0]]
    found = {}
    for ledger in shown:
        ranks = kinds[ledger]
        runs = len(ranks) > 1 and ranks[-1] - ranks[0] + 1 == len(ranks)
        numbers = f"{ranks[0]}-{ranks[-1]}" if runs else ", ".join(map(str, ranks))
        each = f"each of {option.layout.replicas}: " if option.layout.replicas > 1 else ""
        found[f"{each}rank{'s' * (len(ranks) > 1)} {numbers}"] = ledger
    return found


def _options(plan: Plan) -> Table:
    table = Table(
        title="options, side by side", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    table.add_column("devices as", no_wrap=True)
    for heading in ("#", "rank takes", "of it", "max seqs", "step", "comm", "prompt/s", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for option in plan.compared:
        chosen = option is plan.recommendation.option
        table.add_row(*_row(option), "← this" if chosen else _mark(option), style="bold" if chosen else "")
    return table


def _row(option: Option) -> list[str]:
    speed, layout = option.speed, option.layout
    cells = [
        str(layout),
        str(layout.devices),
        gb(option.fullest.total_bytes),
        f"{option.used:.0%}",
        "?" if option.max_concurrency is None else f"{option.max_concurrency:,}",
    ]
    if speed is None:
        return [*cells, "?", "?", "?", "?"]
    share = f"{speed.decode.share:.0%}" if layout.ranks > 1 else ""
    prompts = speed.prompt_tok_s * layout.replicas
    return [*cells, ms(option.step_s), share, _rate(prompts), _rate(option.tok_s)]


def _rate(value: float) -> str:
    return said(round(value)) if value >= 1e6 else f"{value:,.0f}"


def _mark(option: Option) -> str:
    if not option.fits:
        return "tight" if option.used <= 1 else "too big"
    return "" if option.served else "not served"


def _advice(console: Console, plan: Plan, command: str | None) -> None:
    advice = plan.recommendation
    console.print(f"[bold]{_plain(advice.sentence)}[/bold]")
    _list(console, advice.reasons)
    if command is not None:
        console.print(f"  {command}", markup=False, soft_wrap=True)
    console.print(
        f"  rank takes: the fullest one; max seqs: in {COMFORT:.0%} of the memory; step: a token for every "
        "sequence; comm: messages over computing; prompt/s: tokens of prompts alone; tokens/s: generated, "
        "prompts of sequences that follow included",
        markup=False,
    )
    console.print()


def _plain(text: str) -> str:
    """Without what rich would take for markup."""
    return text.replace("[", "\\[")
