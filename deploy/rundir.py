"""The run directory: everything one mesh leaves on disk, readable by its user only.

lock               held by the supervisor while it lives
state.json         services, pids, ports, options; replaced atomically
credentials.json   passwords of this run, gone when the mesh has stopped
conf/              server configurations, gone likewise
ready/NAME.json    written by each service once it listens
log/NAME.log       output of each service, limited in size
tier/              KV blocks on disk, if there are to be any; they outlive the mesh
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

LOG_LIMIT_BYTES = 16 << 20
"""A log that grows beyond this is moved to `NAME.log.1`, which it replaces."""


class RunDirError(RuntimeError):
    """A person can read it: what is wrong with the run directory and what to do."""


def default_run_dir(env: dict[str, str]) -> Path:
    """`$XDG_STATE_HOME/hortator/default`, by default `~/.local/state/hortator/default`."""
    state = env.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hortator" / "default"


class RunDir:
    """Paths and atomic files of one run. Use `claim()` before writing anything."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock: int | None = None

    @property
    def ready(self) -> Path:
        return self.path / "ready"

    @property
    def conf(self) -> Path:
        return self.path / "conf"

    @property
    def tier(self) -> Path:
        """Blocks of the second tier, which outlive the mesh."""
        return self.path / "tier"

    def log(self, name: str) -> Path:
        return self.path / "log" / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        return self.ready / f"{name}.json"

    def claim(self) -> None:
        """Create the directory and take its lock. Raises `RunDirError` when a mesh runs in it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise RunDirError(
                f"cannot use run directory {self.path}: {error.strerror}; choose another with --run-dir"
            ) from None
        while True:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                pid = (self.read_state() or {}).get("supervisor", {}).get("pid", "unknown")
                raise RunDirError(
                    f"a mesh is already running in {self.path} (supervisor pid {pid}); "
                    f"stop it with `hortator down --run-dir {self.path}`, or choose another --run-dir"
                ) from None
            # The former holder removes the file when it ends: what we locked may be that removed file.
            try:
                if os.fstat(fd).st_ino == os.stat(self.path / "lock").st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(fd)
        self._lock = fd
        for sub in (self.ready, self.conf, self.path / "log"):
            sub.mkdir(mode=0o700, exist_ok=True)

    def release(self) -> None:
        """Remove what only a running mesh needs, then give up the lock."""
        self.forget_secrets()
        shutil.rmtree(self.ready, ignore_errors=True)
        self.drop_claim()

    def drop_claim(self) -> None:
        """Give up the lock alone, for the process that will take it next."""
        if self._lock is not None:
            (self.path / "lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def refuse_if_claimed(self) -> None:
        """Raises `RunDirError` when a mesh runs here; creates nothing."""
        if (self.path / "lock").exists():
            self.claim()
            self.drop_claim()

    def forget_secrets(self) -> None:
        (self.path / "credentials.json").unlink(missing_ok=True)
        shutil.rmtree(self.conf, ignore_errors=True)

    def write_state(self, state: dict[str, Any]) -> None:
        self.write("state.json", json.dumps(state, indent=1) + "\n")

    def read_state(self) -> dict[str, Any] | None:
        return self._read_json("state.json")

    def read_credentials(self) -> dict[str, Any] | None:
        return self._read_json("credentials.json")

    def write(self, name: str, text: str) -> Path:
        """Replace a file of the run directory atomically, readable by its owner only."""
        target = self.path / name
        temporary = target.with_name(target.name + ".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, target)
        return target

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunDirError(f"{self.path / name} is damaged ({error}); remove it") from None


def limit_log(path: Path, limit: int = LOG_LIMIT_BYTES) -> bool:
    """Move a log that outgrew `limit` aside. Its writer appends, so truncating in place is safe."""
    try:
        if path.stat().st_size <= limit:
            return False
    except FileNotFoundError:
        return False
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
    return True


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
