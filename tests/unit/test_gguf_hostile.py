"""Damaged and hostile GGUF files: a reason in words, quickly and in little memory, whatever the bytes are."""

import json
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf import GGUFValueType as Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model import ModelError, open_folder
from shared.model.gguf_import import import_gguf
from shared.model.gguf_reader import read_gguf
from shared.model.progress import silent
from tests.support.gguf_files import encode, rewrite, weights, write

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound file's bytes."""
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", weights(1, "llama")).read_bytes()


@pytest.fixture(scope="module")
def header_bytes(whole):
    at = whole.rindex(b"blk.1.") + 200  # somewhat into the tensors' bytes
    return min(at, len(whole))


def outcome(body: bytes) -> str:
    """The reason for which a file of these bytes is refused; "" where it is served. All else is a bug."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "m.gguf", Path(folder) / "out"
        out.mkdir()
        file.write_bytes(body)
        reason = ""
        try:
            import_gguf(file, out, silent)
        except ModelError as error:
            reason = str(error)
        if reason:
            assert "m.gguf" in reason
            assert "not finite" in reason or not (out / "model.safetensors").exists()
        else:
            open_folder(out)
        return reason


def test_a_sound_file_is_served(whole):
    assert outcome(whole) == ""


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes_of_the_header_are_served_or_refused_in_words(whole, header_bytes, data):
    body = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_bytes - 1))
        new = data.draw(
            st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([b"\xff" * 8, b"\0" * 8]))
        )
        body[at : at + len(new)] = new
    outcome(bytes(body))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_is_refused(whole, share):
    assert "not a whole GGUF" in outcome(whole[: int(share * len(whole))])


values = st.one_of(
    st.tuples(st.just(Value.STRING), st.sampled_from(["", "llama", "yarn", "\0", "{% for %}"])),
    st.tuples(st.just(Value.UINT32), st.sampled_from([0, 1, 3, 64, 2**31, 2**32 - 1])),
    st.tuples(st.just(Value.INT64), st.sampled_from([-1, 0, 2**62])),
    st.tuples(st.just(Value.FLOAT32), st.sampled_from([0.0, -1.0, 1e-45, 3e38, float("inf"), float("nan")])),
    st.tuples(st.just(Value.BOOL), st.booleans()),
    st.tuples(
        st.just(Value.ARRAY), st.sampled_from([[], [0], [1, 2, 3], ["a"], ["a", "a b"], [0.5], [True]])
    ),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_under_any_key_is_served_or_refused_in_words(whole, tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "keys.gguf"
    file.write_bytes(whole)
    keys = sorted(read_gguf(file).meta)
    changed = data.draw(st.dictionaries(st.sampled_from(keys), st.none() | values, min_size=1, max_size=3))
    outcome(rewrite(file, changed))


def claims(keys=0, tensors=0, body=b""):
    return b"GGUF" + U32.pack(3) + U64.pack(tensors) + U64.pack(keys) + body


def key(name, kind, value):
    return encode(name) + U32.pack(kind) + value


def tensor(name="a", sizes=(32,), kind=0, offset=0):
    dims = b"".join(U64.pack(s) for s in sizes)
    return encode(name) + U32.pack(len(sizes)) + dims + U32.pack(kind) + U64.pack(offset)


HUGE = U64.pack(2**63)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "begins with b''"),
        (b"<!DOCTYPE html>", "begins with b'<!DO'"),
        (b"GGUF", "it has 4 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"GGUF" + U32.pack(1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (claims(keys=2**63), f"{2**63} metadata keys in 24 bytes"),
        (claims(tensors=2**63), f"{2**63} tensors in 24 bytes"),
        (claims(keys=1, body=HUGE + bytes(100)), "text of 9223372036854775808 bytes"),
        (claims(keys=1, body=key("k", 8, HUGE) + bytes(100)), "k has a text of"),
        (claims(keys=1, body=key("k", 9, U32.pack(4) + HUGE) + bytes(100)), "k is a list of 9223"),
        (claims(keys=1, body=key("k", 9, U32.pack(8) + U64.pack(1000)) + bytes(100)), "1000 entries of k"),
        (claims(keys=1, body=key("k", 9, U32.pack(9) + U64.pack(1)) + bytes(100)), "list of value type 9"),
        (claims(keys=1, body=key("k", 13, bytes(8))), "value type 13"),
        (claims(keys=1, body=key("k", 8, U64.pack(1) + b"\xff")), "k has a text that is not UTF-8"),
        (claims(keys=1, body=U64.pack(1) + b"\xff" + bytes(100)), "not UTF-8"),
        (claims(keys=2, body=key("k", 4, bytes(4)) * 2), "'k' occurs twice"),
        (claims(keys=1, body=key("general.alignment", 4, U32.pack(24)) + bytes(100)), "power of two"),
        (claims(keys=1, body=key("general.alignment", 4, U32.pack(0)) + bytes(100)), "power of two"),
        (claims(tensors=1, body=tensor(sizes=()) + bytes(99)), "0 dimensions"),
        (claims(tensors=1, body=tensor(sizes=(1,) * 5) + bytes(99)), "5 dimensions"),
        (claims(tensors=1, body=tensor(sizes=(0, 5)) + bytes(99)), "sizes [0, 5]"),
        (claims(tensors=1, body=tensor(sizes=(2**32, 2**32)) + bytes(99)), "sizes [4294967296"),
        (claims(tensors=1, body=tensor(kind=36) + bytes(99)), "stored as type 36"),
        (claims(tensors=1, body=tensor(sizes=(48,), kind=8) + bytes(99)), "rows of 48 values, but Q8_0"),
        (claims(tensors=1, body=tensor(offset=2**60) + bytes(199)), "ends at byte"),
        (claims(tensors=1, body=tensor(offset=1) + bytes(199)), "not a multiple of 32"),
        (claims(tensors=2, body=tensor() + tensor() + bytes(199)), "'a' occurs twice"),
        (claims(tensors=2, body=tensor("a") + tensor("b", offset=64) + bytes(400)), "overlap"),
        (claims(), "no general.architecture"),
    ],
)
def test_absurd_claims_are_refused_by_name_at_once_and_in_little_memory(body, words):
    began = time.perf_counter()
    tracemalloc.start()
    try:
        assert words in outcome(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": (Value.ARRAY, ["q zz"])}, "merge 0 ('q zz')"),
        ({"tokenizer.ggml.merges": (Value.ARRAY, ["ab"])}, "merge 0"),
        ({"tokenizer.ggml.eos_token_id": (Value.UINT32, 300)}, "eos_token_id"),
        ({"tokenizer.ggml.tokens": (Value.ARRAY, ["a", "b", "a"])}, "tokens 0 and 2 are both 'a'"),
        ({"tokenizer.ggml.tokens": (Value.ARRAY, ["a" * 2000])}, "token 0 has 2000 characters"),
        ({"tokenizer.chat_template": (Value.UINT32, 1)}, "chat_template, wanted a text"),
        ({"llama.block_count": (Value.UINT32, 4000)}, "4000 layers"),
        ({"llama.block_count": (Value.UINT32, 1)}, "only 1 layers"),
        ({"llama.attention.head_count": (Value.UINT32, 0)}, "head_count"),
        ({"llama.attention.head_count": (Value.ARRAY, [4, 2])}, "layers that differ"),
        ({"llama.attention.head_count_kv": (Value.UINT32, 3)}, "4 heads for 3"),
        ({"llama.rope.scaling.type": (Value.STRING, "yarn")}, "'yarn'"),
        ({"llama.rope.scaling.factor": (Value.FLOAT32, 4.0)}, "rotary scaling 'linear'"),
        ({"llama.attention.causal": (Value.BOOL, False)}, "attention.causal"),
        ({"llama.logit_scale": (Value.FLOAT32, 8.0)}, "logit_scale = 8.0"),
        ({"llama.attention.value_length": (Value.UINT32, 8)}, "different length"),
        ({"split.count": (Value.UINT16, 3)}, "file 1 of 3"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_by_its_key(whole, tmp_path, changed, words):
    (tmp_path / "m.gguf").write_bytes(whole)
    assert words in outcome(rewrite(tmp_path / "m.gguf", changed))


def test_a_model_without_a_chat_template_is_served_without_chat(whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(whole)
    out = tmp_path / "out"
    out.mkdir()
    import_gguf(tmp_path / "m.gguf", out, silent)
    assert open_folder(out).chat_template is None
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_weights_that_are_not_finite_are_found_while_converting(whole, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    place = next(t for t in read_gguf(file).tensors if t.name == "blk.1.ffn_up.weight").start
    reason = outcome(whole[:place] + struct.pack("<f", float("nan")) + whole[place + 4 :])
    assert "blk.1.ffn_up.weight holds values that are not finite" in reason


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        import_gguf(tmp_path, tmp_path, silent)
