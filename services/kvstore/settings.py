"""Settings of a kvstore process."""

from dataclasses import dataclass
from pathlib import Path

from shared.runtime.settings import PREFIX, ServiceSettings, SettingsError, parse_size

_ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, kw_only=True)
class KvstoreSettings(ServiceSettings):
    """One kvstore process; of several, one writes at a time, and each has a second tier of its own."""

    sweep_every_s: float = 60.0
    """A sweep of the prefix index begins this long after the last one began. It also extends the entries'
    lives, so keep it well below the 900 s they last."""
    tier_memory: str = "0"
    """Memory of the second tier of KV blocks: bytes, or with KiB, MiB, GiB, TiB; taken as blocks come. 0: no
    second tier."""
    tier_disk: str = "0"
    """Disk that blocks go to when they leave that memory; 0: none. It outlives the process."""
    tier_dir: str = ""
    """Folder of the blocks on disk, for this process alone."""
    tier_host: str = "127.0.0.1"
    """Address the second tier listens at. Workers that reach it are trusted with a secret that they get over
    NATS; what follows is not encrypted."""
    tier_port: int = 0
    """0: any free one; workers are told."""
    tier_announce: str = ""
    """Host by which workers reach it; empty: tier_host."""


@dataclass(frozen=True)
class TierOptions:
    """The second tier as the settings mean it."""

    memory_bytes: int
    disk_bytes: int
    folder: Path | None
    host: str
    port: int
    announce: str


def tier_options(settings: KvstoreSettings) -> TierOptions | None:
    """None: there is to be none. Raises `SettingsError`."""
    memory = parse_size(f"{PREFIX}TIER_MEMORY", settings.tier_memory)
    disk = parse_size(f"{PREFIX}TIER_DISK", settings.tier_disk)
    if not memory:
        if disk:
            raise SettingsError(
                f"{PREFIX}TIER_DISK={settings.tier_disk!r} without memory: blocks pass through it, "
                f"set {PREFIX}TIER_MEMORY to some, for example 256MiB"
            )
        return None
    if disk and not settings.tier_dir:
        raise SettingsError(
            f"{PREFIX}TIER_DISK={settings.tier_disk!r} without a folder: name it in {PREFIX}TIER_DIR"
        )
    if settings.tier_port > 65535:
        raise SettingsError(f"{PREFIX}TIER_PORT={settings.tier_port} is no port: ports are 0 to 65535")
    announce = settings.tier_announce or settings.tier_host
    if announce in _ANYWHERE:
        raise SettingsError(
            f"{PREFIX}TIER_HOST={settings.tier_host!r} is every address: set {PREFIX}TIER_ANNOUNCE to "
            "the one that workers reach"
        )
    folder = Path(settings.tier_dir).expanduser().absolute() if disk else None
    return TierOptions(memory, disk, folder, settings.tier_host, settings.tier_port, announce)
