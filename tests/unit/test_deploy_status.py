"""What `hortator status` makes of what workers tell."""

import json

from deploy.status import engine, engine_line

CANDIDATES = [
    {"kernels": "native", "threads": 2, "decode_ms": 13.5, "prefill_tok_s": 701.2, "chosen": True},
    {"kernels": "torch", "threads": 2, "decode_ms": 24.0, "prefill_tok_s": 598.0, "chosen": False},
]
DETAIL = {
    "choice": "native, 2 threads: the fastest of 2 measured",
    "dtype": "float16",
    "kv_dtype": "float32",
    "deterministic": "yes",
    "candidates": json.dumps(CANDIDATES),
}


def test_an_instance_says_in_one_line_how_it_computes_and_why():
    assert engine_line("w0", engine(DETAIL)) == (
        "w0: native, 2 threads: the fastest of 2 measured; decode 13.5 ms, prefill 701 tok/s; "
        "float16 weights, float32 KV; deterministic"
    )


def test_for_programs_the_table_of_candidates_is_a_table():
    assert engine(DETAIL)["candidates"] == CANDIDATES


def test_a_mock_or_a_worker_of_another_version_is_shown_with_what_it_tells():
    assert engine_line("w1", engine({"executor": "mock"})) == "w1: mock"
    assert engine({"candidates": "{"})["candidates"] == []
    assert engine_line("w2", engine({"candidates": "3"})) == "w2: "
