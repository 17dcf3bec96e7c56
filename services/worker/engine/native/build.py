"""Compiling our libraries with the system's compiler, once per source, compiler and CPU, and loading them."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shared.model.cache import cache_root

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Library:
    """What is compiled into one shared library."""

    name: str
    main: Path
    """The source file that includes all others."""
    sources: tuple[Path, ...]
    """Files, and folders of them, that it includes; a change in one of them means another library."""
    cpu_flags: frozenset[str] = frozenset()
    """What the CPU must be able to do, in the words of /proc/cpuinfo."""


_COLLECTIVE = _HERE.parents[1] / "collective" / "src"
KERNELS = Library(
    "kernels",
    _HERE / "src" / "decoder.cpp",
    (_HERE / "src", _COLLECTIVE / "exchange.h"),
    frozenset({"avx2", "fma", "f16c"}),
)
COLLECTIVE = Library("collective", _COLLECTIVE / "collective.cpp", (_COLLECTIVE,))

_FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fno-math-errno", "-shared", "-fPIC")
_SCRATCH = "compiling-"
_DIGEST_BYTES = 32
_VERSION_S, _COMPILE_S = 20.0, 300.0
"""How long the compiler may take to tell its version, and to compile."""


class KernelsUnavailable(RuntimeError):
    """A library of ours cannot be had on this machine; the message says why and what would help."""


def cache_dir() -> Path:
    """Where compiled libraries are kept: `kernels` beside the models in the node's cache."""
    return cache_root() / "kernels"


def load(library: Library = KERNELS) -> ctypes.CDLL:
    """The compiled library, compiling it first if need be. Raises `KernelsUnavailable`."""
    path = ensure(library)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(
            f"{path} cannot be loaded ({error}); set HORTATOR_CACHE to a folder that programs may run from"
        ) from None


def ensure(library: Library = KERNELS) -> Path:
    """The library's place, compiled first unless it lies there whole. Raises `KernelsUnavailable`."""
    path = library_path(library)
    if not _whole(path):
        _compile(library, path)
    return path


def library_path(library: Library = KERNELS) -> Path:
    """Where the library for its sources, this compiler and this CPU lies or will lie."""
    compiler = _compiler()
    missing = sorted(library.cpu_flags - _cpu_flags())
    if missing:
        raise KernelsUnavailable(f"this CPU ({platform.machine()}) lacks {', '.join(missing)}")
    digest = hashlib.sha256()
    for place in library.sources:
        for source in sorted(place.iterdir()) if place.is_dir() else (place,):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version, _ = _call([*compiler, "--version"], _VERSION_S)
    digest.update(" ".join((*compiler, *_FLAGS)).encode() + version.encode())
    digest.update(" ".join(sorted(_cpu_flags())).encode())
    return cache_dir() / f"{library.name}-{digest.hexdigest()[:24]}.so"


def _compile(library: Library, path: Path) -> None:
    """Compile into `path`, atomically: two processes may do so at once. Raises `KernelsUnavailable`."""
    command = [*_compiler(), *_FLAGS, str(library.main), "-o"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        log.info("compiling the native %s, once on this machine: up to a minute", library.name)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            said, status = _call([*command, str(made)], _COMPILE_S)
            if status:
                raise KernelsUnavailable(f"{shlex.join(command)} failed: {said.strip()[-2000:]}")
            content = made.read_bytes()
            with made.open("ab") as file:
                file.write(hashlib.sha256(content).digest())
            os.replace(made, path)
    except OSError as error:
        raise KernelsUnavailable(
            f"compiling into {path.parent} failed ({error}); HORTATOR_CACHE names another folder for it"
        ) from None


def _sweep(folder: Path) -> None:
    """Remove what compilations left whose process was killed."""
    for left in folder.glob(f"{_SCRATCH}*"):
        if time.time() - left.stat().st_mtime > 2 * _COMPILE_S:
            shutil.rmtree(left, ignore_errors=True)


def _whole(library: Path) -> bool:
    """Whether every byte is there: what follows a library's own bytes, its digest, is nothing to the loader.

    A file that a crash or a full disk cut off must not be loaded: it would kill the process.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    own, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(own).digest() == digest


def _call(command: list[str], limit_s: float) -> tuple[str, int]:
    """(all it says, exit status). What runs for longer is ended, with everything that it started."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        ) as process:
            try:
                return process.communicate(timeout=limit_s)[0], process.returncode
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(
            f"{shlex.join(command)} did not end within {limit_s:.0f} s; name a working compiler with CXX=…"
        ) from None
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run ({error})") from None


def _compiler() -> list[str]:
    """The command, with what `$CXX` adds to it, as in `ccache g++`."""
    wanted = os.environ.get("CXX", "").strip()
    try:
        asked = [shlex.split(wanted)] if wanted else [["g++"], ["c++"], ["clang++"]]
    except ValueError as error:
        raise KernelsUnavailable(f"CXX={wanted} is not a command ({error}); correct it") from None
    for program, *arguments in asked:
        if found := shutil.which(program):
            return [found, *arguments]
    raise KernelsUnavailable(
        f"no C++ compiler ({wanted or 'g++, c++ or clang++'}) on PATH; install one (apt: g++)"
    )


def _cpu_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()
