"""What travels between processes stays readable: by older and newer ones, and by anybody with msgpack."""

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.subjects import TABLE
from shared.wire import BadFrame, Codec, Row, Wire, encode

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("golden_messages", HERE / "golden_messages.py")
assert _spec is not None
assert _spec.loader is not None
_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_golden)
EXAMPLES: dict[str, Wire] = _golden.EXAMPLES


def _union(carries: Any) -> tuple[type[Wire], ...]:
    return get_args(carries) or (carries,)


CARRIED = {
    kind for row in TABLE.values() for type_ in (row.carries, row.reply) if type_ for kind in _union(type_)
}
CODECS = {name: row.codec for name, row in TABLE.items()} | {
    f"{name} reply": row.reply_codec for name, row in TABLE.items() if row.reply
}
KINDS = sorted(EXAMPLES)


def golden(kind: str) -> bytes:
    return (HERE / "golden" / f"{kind}.v1.bin").read_bytes()


def kind_of(type_: type[Wire]) -> str:
    return str(type_.__struct_config__.tag)


def test_every_message_that_a_subject_carries_has_golden_bytes() -> None:
    assert {kind_of(type_) for type_ in CARRIED} == set(EXAMPLES)
    assert {path.name for path in (HERE / "golden").iterdir()} == {f"{kind}.v1.bin" for kind in EXAMPLES}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_bytes_decode_to_the_example_and_back(kind: str) -> None:
    example = EXAMPLES[kind]
    assert Codec(type(example)).decode(golden(kind)) == example
    assert encode(example) == golden(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_examples_leave_no_field_at_its_default(kind: str) -> None:
    """Otherwise golden bytes would not notice a renamed or retyped field."""
    example = EXAMPLES[kind]
    sent = msgpack.unpackb(golden(kind), strict_map_key=False)
    assert set(sent) == {"kind", *example.__struct_fields__}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_msgpack_reads_a_frame_as_a_map_that_names_its_kind(kind: str) -> None:
    frame = msgpack.unpackb(golden(kind), strict_map_key=False)
    assert frame.pop("kind") == kind
    assert list(frame) == list(EXAMPLES[kind].__struct_fields__)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_appended_by_a_newer_process_are_skipped(kind: str) -> None:
    frame = msgpack.unpackb(golden(kind), strict_map_key=False)
    newer = _append_to_rows(frame, _row_fields(type(EXAMPLES[kind])))
    newer["appended_later"] = {"anything": [1, "x"]}
    assert Codec(type(EXAMPLES[kind])).decode(msgpack.packb(newer)) == EXAMPLES[kind]


def _row_fields(type_: type[Wire]) -> dict[str, bool]:
    """Fields that hold a list of rows (True) or a single row (False)."""
    fields = {}
    for field in msgspec.structs.fields(type_):
        inner = next((arg for arg in get_args(field.type)), None)
        if isinstance(inner, type) and issubclass(inner, Row):
            fields[field.name] = True
        elif isinstance(field.type, type) and issubclass(field.type, Row):
            fields[field.name] = False
    return fields


def _append_to_rows(frame: dict[str, Any], rows: dict[str, bool]) -> dict[str, Any]:
    for name, many in rows.items():
        frame[name] = [[*row, "later"] for row in frame[name]] if many else [*frame[name], "later"]
    return frame


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_of_an_older_process_is_filled_up_with_defaults(kind: str) -> None:
    type_ = type(EXAMPLES[kind])
    frame = msgpack.unpackb(golden(kind), strict_map_key=False)
    required = {f.name for f in msgspec.structs.fields(type_) if f.required}
    older = {name: value for name, value in frame.items() if name == "kind" or name in required}
    decoded = Codec(type_).decode(msgpack.packb(older))
    for field in msgspec.structs.fields(type_):
        if not field.required and field.default is not msgspec.NODEFAULT:
            assert getattr(decoded, field.name) == field.default


def test_a_steady_decode_step_of_256_sequences_takes_about_100_bytes() -> None:
    from shared.wire import Step

    assert len(encode(Step(instance="w0", epoch=3, owner="s-1", incarnation=2, seq=1 << 20))) <= 110


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa4\xff\xfe\xfd\xfc",
        b"\x81\xa4kind\xa7unknown",
        b"\x81\xa4kind\x01",
        b"\x81\xc4\x04kind\xc4\x04step",
        msgpack.packb({"kind": "step", "instance": 7}),
        msgpack.packb({"kind": "tokens", "epoch": "x", "owner": "s", "seq": 1}),
        msgpack.packb({"kind": "submit", "client": "c", "request_id": "r", "prompt": [2**65 % 2**63, "x"]}),
    ],
    ids=range(14),
)
def test_hostile_bytes_raise_bad_frame_and_nothing_else(name: str, payload: bytes) -> None:
    with pytest.raises(BadFrame):
        CODECS[name].decode(payload)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_damaged_frames_decode_or_raise_bad_frame_and_nothing_else(kind: str, data: st.DataObject) -> None:
    frame = bytearray(golden(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for payload in (bytes(frame), bytes(frame[:cut])):
        with suppress(BadFrame):
            Codec(type(EXAMPLES[kind])).decode(payload)
