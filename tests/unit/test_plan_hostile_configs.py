"""A config.json is somebody else's file: whatever it holds gives a plan or a reason, never a traceback."""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory.devices import BadDevice, device_of, find_device
from services.worker.memory.footprint import Case, Demand
from services.worker.memory.model_config import parse_sizes, read_sizes
from services.worker.memory.plan import make_plan
from services.worker.memory.sizes import BadModel

T = TypeVar("T")

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
KEYS = (
    *GOOD,
    *(
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_experts",
        "n_shared_experts",
    ),
    *("num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "text_config", "rope_scaling"),
    *("sliding_window", "layer_types", "auto_map", "quantization_config", "attention_bias", "rms_norm_eps"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(0, 200)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["gpt2", "qwen3_moe", "deepseek_v3", "falcon"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
DEMAND = Demand(concurrency=4, context=128, output=16, dtype="float16", kv_dtype="float16")


def answer(ask: Callable[[], T]) -> T | str:
    """What `ask` gives, or the reason why not."""
    try:
        return ask()
    except (BadModel, BadDevice) as error:
        return str(error)


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_value_under_any_key_gives_a_plan_or_a_reason(changes: dict[str, Any]) -> None:
    sizes = answer(lambda: read_sizes(GOOD | changes, "config.json"))
    if isinstance(sizes, str):
        assert "config.json" in sizes
        assert len(sizes.encode()) < 2000
        return
    plan = make_plan(Case(sizes, find_device("L4"), DEMAND, 2))
    assert plan.ledger.total_bytes > 0
    json.dumps(plan.as_dict(), allow_nan=False)


@given(raw=VALUES)
@settings(max_examples=100, deadline=None)
def test_any_json_at_all_gives_sizes_or_a_reason(raw: Any) -> None:
    with pytest.raises(BadModel):
        read_sizes(raw, "config.json")


@given(text=st.binary(max_size=200))
def test_any_bytes_give_a_reason(text: bytes) -> None:
    with pytest.raises(BadModel):
        parse_sizes(text, "config.json")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"hidden_size": ' + b"9" * 100_000 + b"}",
        b'{"num_hidden_layers": NaN, "hidden_size": Infinity}',
        b"\xff\xfe{}",
        b'{"x": "' + b"y" * (10 << 20) + b'"}',
    ],
    ids=["nested lists", "nested objects", "a number of 100,000 digits", "NaN", "UTF-16", "10 MB"],
)
def test_hostile_files_give_a_reason_within_a_moment(text: bytes) -> None:
    with pytest.raises(BadModel, match=r"config\.json"):
        parse_sizes(text, "config.json")


DEVICE = {"name": "X1", "memory_gb": 24, "read_gb_s": 300, "tflops": 100, "link_gb_s": 32}


@given(
    changes=st.dictionaries(st.sampled_from([*DEVICE, "tflops8", "link_us", "island", "kind", "?"]), VALUES)
)
@settings(max_examples=100, deadline=None)
def test_any_description_of_a_device_gives_one_or_a_reason(changes: dict[str, Any]) -> None:
    device = answer(lambda: device_of(DEVICE | changes, "x1.json"))
    if isinstance(device, str):
        assert "x1.json" in device
    else:
        assert device.memory_bytes > 0
        assert math.isfinite(device.read_b_s)
