"""What was found out about this machine, kept in the node's cache until anything it depends on changes."""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from services.worker.engine.native import build

log = logging.getLogger(__name__)

T = TypeVar("T")


class Remembered(Generic[T]):
    """One fact of a type, in a file named by everything it depends on.

    A file that cannot be read, is not of the type or was written for other circumstances counts as none; one
    that cannot be written is done without.
    """

    def __init__(self, kind: type[T], name: str, depends_on: Mapping[str, object]) -> None:
        self._kind = kind
        self._depends_on = json.dumps(depends_on, sort_keys=True, default=str)
        digest = hashlib.sha256(self._depends_on.encode()).hexdigest()[:24]
        self.path = build.cache_dir().parent / name / f"{digest}.json"

    def recall(self) -> T | None:
        try:
            record = msgspec.json.decode(self.path.read_bytes())
            if record["depends_on"] != self._depends_on:
                return None
            return msgspec.convert(record["fact"], self._kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is not used: %s", self.path, error)
            return None

    def keep(self, fact: T) -> None:
        """Atomically: two processes may do so at once."""
        record = {"depends_on": self._depends_on, "fact": fact}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as scratch:
                made = Path(scratch) / self.path.name
                made.write_bytes(msgspec.json.encode(record))
                os.replace(made, self.path)
        except OSError as error:
            log.warning("%s cannot be written, so it is measured anew next time: %s", self.path, error)


def cpu_name() -> str:
    """Model of the CPU and what it can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "CPU part", "Features")
    first = {key: line for line in reversed(lines) if (key := line.partition("\t")[0]) in wanted}
    return "\n".join(first[key] for key in sorted(first)) or platform.machine()
