"""Compiling the kernels with the system's compiler, once per source, compiler and CPU, and loading them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_MAIN = "decoder.cpp"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fno-math-errno", "-shared", "-fPIC")
_NEEDED_CPU_FLAGS = {"avx2", "fma", "f16c"}


class KernelsUnavailable(RuntimeError):
    """The native kernels cannot be had on this machine; the message says why and what would help."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: `$HORTATOR_CACHE/kernels`, by default under ~/.cache/hortator."""
    root = os.environ.get("HORTATOR_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "hortator") / "kernels"


def load() -> ctypes.CDLL:
    """The compiled kernels, compiling them first if need be. Raises `KernelsUnavailable`."""
    library = library_path()
    if not library.exists():
        compile_kernels(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(
            f"{library} cannot be loaded ({error}); delete it to compile it anew"
        ) from None


def library_path(extra_flags: tuple[str, ...] = ()) -> Path:
    """Where the library for these sources, this compiler and this CPU lies or will lie."""
    compiler = _compiler()
    missing = sorted(_NEEDED_CPU_FLAGS - _cpu_flags())
    if missing:
        raise KernelsUnavailable(f"this CPU ({platform.machine()}) lacks {', '.join(missing)}")
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(" ".join((compiler, *_FLAGS, *extra_flags)).encode() + version)
    digest.update(" ".join(sorted(_cpu_flags())).encode())
    return cache_dir() / f"kernels-{digest.hexdigest()[:24]}.so"


def compile_kernels(library: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile into `library`, atomically: two processes may do so at once. Raises `KernelsUnavailable`."""
    command = [_compiler(), *_FLAGS, *extra_flags, str(SOURCES / _MAIN), "-o"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            result = subprocess.run(
                [*command, str(made)], capture_output=True, text=True, timeout=300, check=False
            )
            if result.returncode:
                raise KernelsUnavailable(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
            os.replace(made, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"compiling into {library.parent} failed: {error}") from None


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return found
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
