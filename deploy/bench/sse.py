"""HTTP/1.1 responses and server-sent events, parsed from bytes as they come. Pure."""


class BadResponse(Exception):
    """The server's bytes are not HTTP/1.1, or the body ended early."""


class ResponseParser:
    """One response: feed bytes, get body bytes. `status` is 0 until the head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.finished = False
        self._buffer = bytearray()
        self._chunked = False
        self._left: int | None = (
            None  # bytes of body (or of the current chunk) still to come; None: until close
        )

    def feed(self, data: bytes) -> bytes:
        """Body bytes that became known. Raises BadResponse."""
        if self.status == 0:
            self._buffer += data
            if not self._take_head():
                return b""
            data = bytes(self._buffer)
            self._buffer.clear()
        if self._chunked:
            return self._dechunk(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.finished = self._left == 0
        return body

    def end(self) -> None:
        """The connection was closed. Raises BadResponse if that is too early."""
        if self.status == 0:
            raise BadResponse("the connection was closed before a response came")
        if (self._chunked or self._left is not None) and not self.finished:
            raise BadResponse("the connection was closed in the middle of the response")
        self.finished = True

    def _take_head(self) -> bool:
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            lines = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            parts = lines[0].split(" ", 2)
            if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
                raise BadResponse(f"not an HTTP/1.1 response: {lines[0][:80]!r}")
            if parts[1].startswith("1"):
                continue  # informational; the real head follows
            self.status = int(parts[1])
            pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
            self.headers = {name.strip().lower(): value.strip() for name, value in pairs}
            self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
            length = self.headers.get("content-length", "")
            if self._chunked:
                self._left = 0
            elif length.isdigit():
                self._left = int(length)
                self.finished = self._left == 0
            return True
        if len(self._buffer) > 1 << 16:
            raise BadResponse("the response head is longer than 64 KiB")
        return False

    def _dechunk(self, data: bytes) -> bytes:
        # `_left` counts the chunk's data and its closing CRLF, so that both are skipped by one rule.
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        at, body = 0, []
        while at < len(data) and not self.finished:
            assert self._left is not None
            if self._left:
                take = min(self._left, len(data) - at)
                if self._left > 2:
                    body.append(data[at : at + min(take, self._left - 2)])
                self._left -= take
                at += take
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > 1024:
                    raise BadResponse("a chunk's size line is longer than 1 KiB")
                self._buffer += data[at:]
                break
            try:
                size = int(data[at:end].split(b";", 1)[0], 16)
            except ValueError:
                raise BadResponse(f"not a chunk size: {data[at:end][:40]!r}") from None
            at = end + 2
            if size == 0:
                self.finished = True
            else:
                self._left = size + 2
        return b"".join(body)


class EventParser:
    """Server-sent events: feed body bytes, get the data of each whole event; other fields are dropped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, body: bytes) -> list[bytes]:
        buffer = self._buffer + body
        if b"\r" in buffer:
            held = b"\r" if buffer.endswith(b"\r") else b""  # perhaps the first half of CRLF
            buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *blocks, self._buffer = buffer.split(b"\n\n")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            elif (data := _data_of(block)) is not None:
                events.append(data)
        return events


def _data_of(block: bytes) -> bytes | None:
    """The joined data lines of a block; None where it has none (a comment or ping)."""
    found = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return b"\n".join(found) if found else None
