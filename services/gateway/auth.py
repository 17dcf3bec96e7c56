"""API keys: who may use the gateway, and as which tenant. Only digests of keys are kept."""

import hashlib
import hmac
import secrets
from pathlib import Path

from services.gateway.errors import ApiError


class KeyFileError(ValueError):
    """The key file cannot be used; names the line, never the key."""


class Keys:
    """Answers `tenant` for an Authorization header. Without keys everybody is the nameless tenant."""

    def __init__(self, tenants: dict[str, str]) -> None:
        """`tenants`: key → tenant."""
        # Keyed with a secret of this process: what a look-up takes then tells nothing about any key.
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._digest(key.encode()): tenant for key, tenant in tenants.items()}

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: bytes | None) -> str:
        """Raises ApiError(401) unless the header is `Bearer` with a known key."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = self._digest(key.strip())
        found: str | None = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None or scheme.lower() != b"bearer":
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")
        return found

    def opens(self, authorization: bytes) -> bool:
        """Whether this header is enough; always, without keys."""
        try:
            self.tenant(authorization)
        except ApiError:
            return False
        return True

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def read_keys(file: str) -> Keys:
    """Lines `key [tenant]`, `#` begins a comment. "" is no file and no keys. Raises KeyFileError."""
    if not file:
        return Keys({})
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"api_key_file {file} cannot be read: {error}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise KeyFileError(f"{file} line {number}: expected `key [tenant]`, found {len(words)} words")
        if words[0] in tenants:
            raise KeyFileError(f"{file} line {number}: this key stands in an earlier line already")
        tenants[words[0]] = words[1] if len(words) == 2 else ""
    if not tenants:
        raise KeyFileError(f"{file} holds no key; add lines `key [tenant]` or unset HORTATOR_API_KEY_FILE")
    return Keys(tenants)
