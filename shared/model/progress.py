"""Progress of long work on stderr: a bar where rich is installed and a person watches, else plain lines."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Takes the bytes done since its last call."""


Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""`with progress(title, total bytes) as advance:` shows how far something of a known size has come."""


@contextmanager
def silent(title: str, total: int) -> Iterator[Advance]:
    yield lambda amount: None


@contextmanager
def on_stderr(title: str, total: int) -> Iterator[Advance]:
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress
        except ImportError:
            pass
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            with RichProgress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task(title, total=total)
                yield lambda amount: bar.advance(task, amount)
            return
    yield _lines(title, total)


def _lines(title: str, total: int) -> Advance:
    done, shown = 0, -1

    def advance(amount: int) -> None:
        nonlocal done, shown
        done += amount
        percent = min(100 * done // max(total, 1), 100)
        if percent // 20 > shown:
            shown = percent // 20
            sys.stderr.write(f"{title}: {percent} % of {total / 1e6:.0f} MB\n")
            sys.stderr.flush()

    return advance
