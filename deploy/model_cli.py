"""`hortator model pull|list|verify|import`: the node's model cache by hand."""

import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from shared.model import CATALOG, ModelError, ModelFolder, resolve
from shared.model.cache import ModelCache
from shared.model.manifest import differences, read_manifest
from shared.model.progress import on_stderr
from shared.model.resolve import import_file

app = typer.Typer(help="Pull, list, verify and import models.", no_args_is_help=True, add_completion=False)

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
    table = Table("name", "aliases", "cached", "source")
    for known in CATALOG:
        origin = f"pypi {known.source.package}=={known.source.version}, {known.licence}"
        table.add_row(known.name, ", ".join(known.aliases), _size(cache, known.name), origin)
    for name in cache.names():
        if all(name != known.name for known in CATALOG):
            manifest = read_manifest(cache.folder(name))
            table.add_row(name, "", _size(cache, name), manifest.source if manifest else "")
    Console().print(table)
    print(f"cache: {cache.models}")


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A name in the cache; empty: all of them.")] = "",
) -> None:
    """Hash every file of cached models and compare with their manifests. Exit status 1 if any differs."""
    cache = ModelCache()
    known = next((m.name for m in CATALOG if model.lower() in (m.name, *m.aliases)), model)
    names = [known] if known else cache.names()
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
            print(f"  remove {cache.folder(name)} and run `hortator model pull` again")
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


def _size(cache: ModelCache, name: str) -> str:
    manifest = read_manifest(cache.folder(name)) if cache.has(name) else None
    return f"{sum(e.size for e in manifest.files.values()) / 1e6:.0f} MB" if manifest else "no"


def _fail(problem: object) -> NoReturn:
    sys.exit(f"hortator model: {problem}")
