"""The node's model cache: each model once, complete or not at all, whoever asks at once."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from shared.model.errors import ModelError
from shared.model.manifest import MANIFEST, hash_file


def cache_root() -> Path:
    """$HORTATOR_CACHE, else ~/.cache/hortator ($XDG_CACHE_HOME is honoured)."""
    if own := os.environ.get("HORTATOR_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hortator"


class ModelCache:
    """Folders `<root>/models/<name>`. A folder there is complete: it is built elsewhere and renamed."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()
        self.models = self.root / "models"

    def folder(self, name: str) -> Path:
        return self.models / name

    def has(self, name: str) -> bool:
        return (self.folder(name) / MANIFEST).is_file()

    def names(self) -> list[str]:
        if not self.models.is_dir():
            return []
        return sorted(p.name for p in self.models.iterdir() if (p / MANIFEST).is_file())

    def ensure(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder of `name`; `build(empty folder)` fills it if it is not there yet.

        One process builds, others wait for it. Whatever `build` raises leaves the cache as it was. Raises
        ModelError where the cache cannot be written.
        """
        target = self.folder(name)
        if self.has(name):
            return target
        try:
            self._build(name, target, build)
        except OSError as error:
            raise ModelError(
                f"{error.filename or target} cannot be written ({error.strerror or error}); make room, or "
                f"set HORTATOR_CACHE to a folder where you may write instead of {self.root}"
            ) from None
        return target

    def _build(self, name: str, target: Path, build: Callable[[Path], None]) -> None:
        with self._lock(name):
            if self.has(name):
                return
            for left in self.models.glob(f".{name}.build-*"):  # by a process killed at work: we hold its lock
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.build-", dir=self.models))
            try:
                work.chmod(0o755)
                build(work)
                if target.exists():  # without a manifest: not one of ours, or half removed
                    shutil.rmtree(target)
                work.rename(target)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise

    def size(self, name: str) -> int:
        """Bytes on disk."""
        return bytes_under(self.folder(name))

    def remove(self, name: str) -> int:
        """Take the folder away, whole or not at all; returns the bytes it had."""
        with self._lock(name):
            size = self.size(name)
            grave = Path(tempfile.mkdtemp(prefix=f".{name}.build-", dir=self.models))
            try:
                if self.folder(name).exists():
                    self.folder(name).rename(grave / name)
            finally:
                shutil.rmtree(grave, ignore_errors=True)
        return size

    def sweep(self) -> int:
        """Remove what killed builds left; one at work holds its lock and stays. Returns the bytes freed."""
        freed = 0
        for left in self.models.glob(".*.build-*"):
            name = left.name[1:].rpartition(".build-")[0]
            with self._lock(name, wait=False) as held:
                if held:
                    freed += bytes_under(left)
                    shutil.rmtree(left, ignore_errors=True)
        return freed

    def content_hash(self, file: Path) -> str:
        """SHA-256 of a large file; computed again only when its `stamp` changed."""
        file = file.resolve()
        known = self.root / "hashes" / f"{sha256(os.fsencode(file)).hexdigest()}.json"
        now = stamp(file)
        try:
            record = json.loads(known.read_text())
            if record["stamp"] == now:
                return str(record["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not hashed before, or the note is damaged: hash it
        digest = hash_file(file)
        part = known.with_suffix(f".{os.getpid()}")
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"stamp": now, "sha256": digest}))
            part.replace(known)
        except OSError:  # without the note it takes a few seconds more next time
            with suppress(OSError):
                part.unlink()
        return digest

    @contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Whether the lock is ours: always, unless `wait` is false."""
        self.models.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let a third process lock a different inode.
        with (self.models / f".{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def stamp(file: Path) -> list[int]:
    """What changes when a file is replaced or written to, even if it is given its former size and time."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def bytes_under(folder: Path) -> int:
    """Bytes of all files in it, though others may be moving and removing them meanwhile."""
    total = 0
    for where, _, files in os.walk(folder):  # unlike Path.rglob, it goes on past a folder that has just gone
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, file)).st_size
    return total
