"""What the gateway can be told; read once from HORTATOR_* variables."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.runtime.settings import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    """`http` is where clients connect."""

    unused: ClassVar[frozenset[str]] = frozenset({"redis_url"})

    model_dir: Path = Path()
    """Folder with tokenizer.json, config.json and, for chat, a chat template."""
    model_aliases: str = ""
    """Further names of the model for clients, separated by commas."""
    max_model_len: int = 0
    """Prompt and output together, in tokens; 0: what config.json says."""
    api_key_file: str = ""
    """Lines `key [tenant]`; a tenant shares no KV with others. Empty: anybody may use the gateway."""
    max_body_bytes: int = 4 << 20
    """Larger requests get 413."""
    max_choices: int = 256
    """Prompts of a request times its n."""
    max_open_requests: int = 4096
    """Requests the gateway holds at once; beyond, 429."""
    request_timeout_s: float = 600.0
    """A request ends with an error after this."""
    queue_timeout_s: float = 60.0
    """So long may it wait for its first step."""
    body_timeout_s: float = 30.0
    """The body must be there within this after the headers, else 408."""
    header_timeout_s: float = 15.0
    """The headers must be there within this after the connection, else 408."""
    ping_s: float = 15.0
    """An idle stream gets a comment this often, so that nobody between thinks it dead."""
    canary_interval_s: float = 5.0
    """While no tokens come by themselves, a canary goes through the mesh this often."""
    canary_timeout_s: float = 10.0
    """Not ready when neither the canary nor anything else brought tokens for this long."""
    max_unread_bytes: int = 8 << 20
    """A client that leaves more of its stream unread than this is cut off."""
