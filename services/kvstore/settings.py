"""Settings of a kvstore process."""

from dataclasses import dataclass

from shared.runtime.settings import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class KvstoreSettings(ServiceSettings):
    """One kvstore process; of several, one writes at a time."""

    sweep_every_s: float = 60.0
    """A sweep of the prefix index begins this long after the last one began. It also extends the entries'
    lives, so keep it well below the 900 s they last."""
