"""`hortator model pull|list|verify|import|rm`: the node's model cache by hand."""

import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from shared.model import CATALOG, ModelError, ModelFolder, resolve
from shared.model.cache import ModelCache
from shared.model.catalog import find
from shared.model.conversion import is_stale, key_of_catalog
from shared.model.manifest import Manifest, differences, read_manifest
from shared.model.progress import on_stderr
from shared.model.resolve import import_file

app = typer.Typer(
    help="Pull, list, verify, import and remove models.", no_args_is_help=True, add_completion=False
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A known name, org/name on the hub, or a path.")] = CATALOG[
        0
    ].name,
) -> None:
    """Fetch a model into the cache (nothing happens if it is there) and print its folder."""
    try:
        _show(resolve(model))
    except ModelError as error:
        _fail(error)


@app.command("list")
def list_models() -> None:
    """Known models and what the cache holds."""
    cache = ModelCache()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("aliases", overflow="fold")
    table.add_column("cached", no_wrap=True)
    table.add_column("source", overflow="fold")
    for known in CATALOG:
        origin = f"pypi {known.source.package}=={known.source.version}, {known.licence}"
        folder = key_of_catalog(known)
        table.add_row(known.name, ", ".join(known.aliases), _size(cache, folder), origin)
    stale = _stale(cache)
    for name in cache.names():
        if all(name != key_of_catalog(known) for known in CATALOG):
            manifest = _manifest(cache, name)
            origin = manifest.source if manifest else "damaged manifest"
            table.add_row(name, "", _size(cache, name), f"stale: {origin}" if name in stale else origin)
    console = Console()
    # A pipe has no width to keep to.
    (console if console.is_terminal else Console(width=200)).print(table)
    print(f"cache: {cache.models}")
    if stale:
        size = sum(cache.size(name) for name in stale) / 1e6
        print(f"{len(stale)} stale, {size:.0f} MB: remove with `hortator model rm --stale`")


@app.command()
def rm(
    models: Annotated[list[str] | None, typer.Argument(help="Names as `list` shows them.")] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="What other versions of hortator converted.")
    ] = False,
) -> None:
    """Remove models from the cache. A mesh that serves one goes on, but cannot start its workers again."""
    cache = ModelCache()
    if not models and not stale:
        _fail("name models to remove, or --stale; `hortator model list` shows what there is")
    names = [_folder_of(cache, model) for model in models or ()]
    names += [name for name in _stale(cache) if stale and name not in names]
    for name in names:
        print(f"removed {name}, {cache.remove(name) / 1e6:.0f} MB")
    if stale and (freed := cache.sweep()):
        print(f"removed what interrupted conversions left, {freed / 1e6:.0f} MB")
    if not names:
        print("nothing is stale")


def _folder_of(cache: ModelCache, model: str) -> str:
    """The cache's folder called so, or the only one of a model called so."""
    known = find(model)
    wanted = key_of_catalog(known) if known else model
    names = cache.names()
    if wanted in names:
        return wanted
    named = [name for name in names if (m := _manifest(cache, name)) and m.name == model]
    if len(named) != 1:
        found = f"; it may be {' or '.join(named)}" if named else ""
        _fail(f"{model!r} is not one folder in the cache ({cache.models}){found}")
    return named[0]


def _stale(cache: ModelCache) -> list[str]:
    return [name for name in cache.names() if (m := _manifest(cache, name)) and is_stale(name, m)]


def _manifest(cache: ModelCache, name: str) -> Manifest | None:
    """None where it is damaged: such a folder is still to be listed and removed."""
    try:
        return read_manifest(cache.folder(name))
    except ModelError:
        return None


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A name in the cache; empty: all of them.")] = "",
) -> None:
    """Hash every file of cached models and compare with their manifests. Exit status 1 if any differs."""
    cache = ModelCache()
    known = find(model)
    wanted = key_of_catalog(known) if known else model
    names = [wanted] if wanted else cache.names()
    bad = False
    for name in names:
        try:
            manifest = read_manifest(cache.folder(name))
        except ModelError as error:
            print(f"{name}: {error}")
            bad = True
            continue
        if manifest is None:
            _fail(f"{name!r} is not in the cache ({cache.models}); `hortator model list` shows what is")
        found = list(differences(cache.folder(name), manifest))
        bad = bad or bool(found)
        print(f"{name}: {'; '.join(found) if found else f'{len(manifest.files)} files are intact'}")
        if found:
            print(f"  `hortator model rm {name}`, then pull or import it again")
    raise typer.Exit(1 if bad else 0)


@app.command("import")
def import_model(
    file: Annotated[Path, typer.Argument(help="A .gguf file.")],
    name: Annotated[str, typer.Option(help="What clients will call it; default: the file's name.")] = "",
) -> None:
    """Convert a GGUF file into a model folder in the cache and print the folder."""
    if not file.is_file():
        _fail(f"{file} is not a file")
    if name and not _NAME.match(name):
        _fail(f"--name {name!r}: use letters, digits, dot, dash and underscore, 64 at most")
    try:
        _show(import_file(file, ModelCache(), on_stderr, name))
    except ModelError as error:
        _fail(error)


def _show(folder: ModelFolder) -> None:
    print(f"{folder.name}: {folder.path}")
    if folder.chat_template is None:
        print(f"{folder.name} has no chat template: it completes texts, but answers no chat requests")


def _size(cache: ModelCache, name: str) -> str:
    return f"{cache.size(name) / 1e6:.0f} MB" if cache.has(name) else "no"


def _fail(problem: object) -> NoReturn:
    sys.exit(f"hortator model: {problem}")
