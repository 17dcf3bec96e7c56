"""The header of a GGUF file: metadata, and where each tensor lies. Every number is doubted before it is used.

The reference reader believes counts and lengths, so a damaged file can keep it busy for ever; this one bounds
them by what the file can hold. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian). Nothing but the header is read.
"""

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from shared.model.errors import ModelError
from shared.model.gguf_metadata import Metadata
from shared.model.gguf_types import TensorType, tensor_type

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type → struct code."""

# Far above any model known (vocabularies have up to 300,000 entries), and little memory all the same.
_MAX_ITEMS = 4 << 20
_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_NAME_BYTES = 1 << 16
_MAX_STRING_BYTES = 16 << 20
_MAX_DIMENSIONS = 4
_MAX_VALUES = 1 << 40

_SMALLEST_KEY = 8 + 1 + 4 + 1
"""Bytes of an entry: length, a name of one letter, type, value."""
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
"""Bytes of a tensor's entry: length, a name of one letter, dimensions, one size, type, offset."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is row-major: rows first, as torch has it."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Path
    start: int
    """Bytes from the beginning of the file."""

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return self.type.bytes_of(self.values)


@dataclass(frozen=True)
class GgufFile:
    path: Path
    meta: Metadata
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """The file's header, checked against the file's size. Raises ModelError that says what is wrong where."""
    try:
        with path.open("rb") as stream:
            _check_start(path, stream.read(24))
            return _Header(path, stream).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None


def _check_start(path: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model: run `git lfs pull` where it lies")
    if start[:4] != _MAGIC:
        raise ModelError(
            f"{path} is not a whole GGUF file: it begins with {start[:4]!r}, not {_MAGIC!r}; "
            "download it again"
        )
    if len(start) < 24:
        raise ModelError(f"{path} is not a whole GGUF file: it has {len(start)} bytes; download it again")
    version = int.from_bytes(start[4:8], "little")
    if version and not version & 0xFFFF:
        raise ModelError(
            f"{path} is a big-endian GGUF file, which is not read here; get the little-endian one"
        )
    if version not in (2, 3):
        raise ModelError(
            f"{path} is a GGUF file of version {version}, 2 and 3 are read; convert the model again with a "
            "current llama.cpp"
        )


class _Header:
    """A cursor over the file's bytes; each method reads one thing and moves on.

    It is read, not mapped: whoever cuts a mapped file short meanwhile ends the process.
    """

    def __init__(self, path: Path, body: BinaryIO) -> None:
        self._path = path
        self._body = body
        self._size = os.fstat(body.fileno()).st_size
        self._at = body.seek(8)
        self._items = 0

    def read(self) -> GgufFile:
        tensor_count, key_count = self._number("Q", "tensor count"), self._number("Q", "key count")
        self._plausible(key_count, _MAX_KEYS, _SMALLEST_KEY, "metadata keys")
        self._plausible(tensor_count, _MAX_TENSORS, _SMALLEST_TENSOR, "tensors")
        meta: Metadata = {}
        for number in range(key_count):
            key = self._string(f"the name of metadata key {number}", _MAX_NAME_BYTES)
            if key in meta:
                raise self._damaged(f"metadata key {key!r} occurs twice")
            meta[key] = self._value(self._number("I", key), key)
        entries = [self._tensor_entry(number) for number in range(tensor_count)]
        return GgufFile(self._path, meta, self._place(entries, self._alignment(meta)))

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, _MAX_STRING_BYTES)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise self._damaged(f"{key} has value type {kind}, which does not exist")
        kind, count = self._number("I", key), self._number("Q", key)
        if kind != _STRING and kind not in _SCALARS:
            raise self._damaged(f"{key} is a list of value type {kind}, which is not known")
        self._items += count
        if self._items > _MAX_ITEMS:
            raise self._damaged(f"{key} is a list of {count} entries, more than any model has")
        if kind == _STRING:
            self._plausible(count, _MAX_ITEMS, 8, f"entries of {key}")
            return [self._string(key, _MAX_STRING_BYTES) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code), key)))

    def _tensor_entry(self, number: int) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._string(f"the name of tensor {number}", _MAX_NAME_BYTES)
        dimensions = self._number("I", f"tensor {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        sizes = [self._number("Q", f"tensor {name!r}") for _ in range(dimensions)]
        if min(sizes) < 1 or math.prod(sizes) > _MAX_VALUES:
            raise self._damaged(f"tensor {name!r} has the sizes {sizes}")
        code, offset = self._number("I", f"tensor {name!r}"), self._number("Q", f"tensor {name!r}")
        kind = tensor_type(code)
        if kind is None:
            raise ModelError(
                f"{self._path}: tensor {name!r} is stored as type {code}, which the installed package gguf "
                "does not know; upgrade it (pip install -U gguf), or get the model as Q8_0 or F16"
            )
        if sizes[0] % kind.block_values:
            raise self._damaged(
                f"tensor {name!r} has rows of {sizes[0]} values, but {kind.name} stores {kind.block_values} "
                "at a time"
            )
        return name, kind, tuple(reversed(sizes)), offset

    def _alignment(self, meta: Metadata) -> int:
        alignment = meta.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _place(
        self, entries: list[tuple[str, TensorType, tuple[int, ...], int]], alignment: int
    ) -> tuple[GgufTensor, ...]:
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._damaged(f"tensor {name!r} lies at offset {offset}, not a multiple of {alignment}")
            tensor = tensors[name] = GgufTensor(name, kind, shape, self._path, first + offset)
            if (end := tensor.start + tensor.stored_bytes) > self._size:
                raise ModelError(
                    f"{self._path} is not a whole GGUF file: tensor {name!r} ends at byte {end}, the file "
                    f"has {self._size}; download it again"
                )
        for one, two in pairwise(sorted(tensors.values(), key=lambda t: t.start)):
            if one.start + one.stored_bytes > two.start:
                raise self._damaged(f"tensors {one.name!r} and {two.name!r} overlap")
        return tuple(tensors.values())

    def _plausible(self, count: int, most: int, smallest: int, what: str) -> None:
        if count > most or count * smallest > self._size - self._at:
            raise self._damaged(f"it wants to hold {count} {what} in {self._size} bytes")

    def _string(self, what: str, most: int) -> str:
        length = self._number("Q", what)
        if length > most:
            raise self._damaged(f"{what} has a text of {length} bytes")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{what} has a text that is not UTF-8") from None

    def _number(self, code: str, what: str) -> Any:
        code = "<" + code
        (value,) = struct.unpack(code, self._take(struct.calcsize(code), what))
        return value

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at or len(taken := self._body.read(count)) < count:
            raise self._damaged(f"it ends within {what}")
        self._at += count
        return taken

    def _damaged(self, problem: str) -> ModelError:
        return ModelError(
            f"{self._path} is not a whole GGUF file: {problem} (read up to byte {self._at}); "
            "download it again"
        )
