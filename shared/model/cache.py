"""The node's model cache: each model once, complete or not at all, whoever asks at once."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

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

        One process builds, others wait for it. Whatever `build` raises leaves the cache as it was.
        """
        target = self.folder(name)
        if self.has(name):
            return target
        with self._lock(name):
            if self.has(name):
                return target
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
        return target

    def remove(self, name: str) -> None:
        with self._lock(name):
            shutil.rmtree(self.folder(name), ignore_errors=True)

    def content_hash(self, file: Path) -> str:
        """SHA-256 of a large file; computed again only when its size or modification time changed."""
        file = file.resolve()
        stat = file.stat()
        known = self.root / "hashes" / f"{sha256(os.fsencode(file)).hexdigest()}.json"
        stamp = [stat.st_size, stat.st_mtime_ns]
        try:
            record = json.loads(known.read_text())
            if record["stamp"] == stamp:
                return str(record["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not hashed before, or the note is damaged: hash it
        digest = hash_file(file)
        known.parent.mkdir(parents=True, exist_ok=True)
        part = known.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"stamp": stamp, "sha256": digest}))
        part.replace(known)
        return digest

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        self.models.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let a third process lock a different inode.
        with (self.models / f".{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
