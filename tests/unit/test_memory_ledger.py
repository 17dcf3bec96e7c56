"""The ledger: sums, comparisons and what a rank of the engine is predicted to take."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import formats
from services.worker.engine.config import ModelConfig
from services.worker.memory import served
from services.worker.memory.ledger import CLASSES, Ledger, differences, size
from services.worker.memory.served import Load, native_weight_bytes, predict_rank
from services.worker.parallel.split import plan_shards

SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192, True, 1e5)
LOAD = Load("float16", "float16", blocks=1456, block_tokens=16, threads=2)

bytes_ = st.integers(0, 1 << 50)
ledgers = st.builds(Ledger, *[bytes_] * len(CLASSES))


def whole(config: ModelConfig, load: Load) -> Ledger:
    return predict_rank(config, plan_shards(config, 1).shards[0], load)


def test_a_ledger_says_exactly_the_seven_numbers_in_their_order():
    assert list(Ledger(1, 2, 3, 4, 5, 6).as_dict().items()) == [
        ("runtime_bytes", 1),
        ("weights_bytes", 2),
        ("kv_bytes", 3),
        ("activation_bytes", 4),
        ("workspace_bytes", 5),
        ("staging_bytes", 6),
        ("total_bytes", 21),
    ]


@given(ledgers, ledgers)
def test_ranks_add_up_by_class_and_in_total(one, other):
    both = (one + other).as_dict()
    assert both == {name: one.as_dict()[name] + other.as_dict()[name] for name in both}
    assert Ledger.of(both) == one + other


def test_the_arithmetic_names_what_there_is_and_the_sum():
    text = Ledger(weights_bytes=3 << 20, kv_bytes=1 << 30).arithmetic()
    assert text == "weights 3.0 MiB + KV 1.0 GiB = 1.0 GiB"
    assert Ledger().arithmetic() == "nothing = 0 bytes"


@pytest.mark.parametrize(
    ("predicted", "measured", "named"),
    [
        (1 << 30, 1 << 30, []),
        (1 << 30, int(1.02 * (1 << 30)), []),
        (1 << 30, int(1.04 * (1 << 30)), ["kv_bytes", "total_bytes"]),
        (int(1.04 * (1 << 30)), 1 << 30, ["kv_bytes", "total_bytes"]),
        (1 << 20, 3 << 20, []),  # pages and allocators explain that
    ],
)
def test_a_class_is_told_when_it_is_off_by_more_than_three_percent(predicted, measured, named):
    found = differences(Ledger(kv_bytes=predicted), Ledger(kv_bytes=measured))
    assert [each.name for each in found] == named


def test_a_runtime_that_is_off_is_told_by_the_total_alone():
    ledger = Ledger(runtime_bytes=200 << 20, kv_bytes=1 << 30)
    more = dataclasses.replace(ledger, runtime_bytes=220 << 20)
    assert differences(ledger, more) == []
    most = dataclasses.replace(ledger, runtime_bytes=400 << 20)
    assert [each.name for each in differences(ledger, most)] == ["total_bytes"]


def test_a_difference_says_what_it_is_of_how_much_and_in_which_direction():
    (found, _) = differences(Ledger(kv_bytes=100 << 20), Ledger(kv_bytes=125 << 20))
    assert str(found) == "KV: measured 125.0 MiB, 20.0% more than the 100.0 MiB predicted"


def test_sizes_are_said_in_the_largest_unit_that_fits():
    assert [size(n) for n in (0, 1023, 1536, 3 << 40)] == ["0 bytes", "1023 bytes", "1.5 KiB", "3.0 TiB"]


def test_formats_are_those_of_the_engine():
    assert {
        name: (form.bytes, form.scaled, form.alignment)
        for name, form in served.FORMATS.items()
        if name != "bfloat16"
    } == {name: (f.bytes, f.top is not None, f.alignment) for name, f in formats.FORMATS.items()}


def test_weights_of_a_known_model_are_its_parameters_in_the_format_and_the_rotary_tables():
    parameters, vectors = 134_515_008, 61 * 576
    tables = 2 * 8192 * 32
    expected = 2 * (parameters - vectors) + 4 * (vectors + tables)
    assert native_weight_bytes(SMOLLM2, "float16") == expected


def test_kv_is_whole_blocks_of_two_times_layers_times_heads_times_size():
    assert whole(SMOLLM2, LOAD).kv_bytes == 1456 * 2 * 30 * 3 * 64 * 2 * 16


@pytest.mark.parametrize("kernels", ["native", "torch", "cuda"])
def test_more_of_anything_never_takes_less(kernels):
    base = dataclasses.replace(LOAD, kernels=kernels)
    for more in ({"blocks": 3000}, {"step_tokens": 4096}, {"slots": 256}, {"dtype": "float32"}):
        small, large = whole(SMOLLM2, base), whole(SMOLLM2, dataclasses.replace(base, **more))
        assert all(large.as_dict()[name] >= small.as_dict()[name] for name in CLASSES), more
        assert large.total_bytes > small.total_bytes


@given(st.integers(1, 9), st.sampled_from(["float32", "float16", "int8", "int8-dynamic"]))
def test_ranks_of_a_group_hold_the_model_once_and_their_share_of_what_is_replicated(ranks, dtype):
    shards = plan_shards(SMOLLM2, ranks).shards
    load = dataclasses.replace(LOAD, dtype=dtype)
    parts = [predict_rank(SMOLLM2, shard, load) for shard in shards]
    alone = whole(SMOLLM2, load)
    assert sum(part.weights_bytes for part in parts) >= alone.weights_bytes
    assert max(part.weights_bytes for part in parts) <= alone.weights_bytes
    held = sum(shard.kv_heads.size for shard in shards)
    assert sum(part.kv_bytes for part in parts) == alone.kv_bytes * held // SMOLLM2.kv_heads
    assert all((part.workspace_bytes > 0) for part in parts) or ranks == 1


@pytest.mark.parametrize("bad", [{"dtype": "int4"}, {"kv_dtype": "int8"}])
def test_formats_that_are_none_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad.values()))):
        whole(SMOLLM2, dataclasses.replace(LOAD, **bad))


def test_a_tied_head_is_counted_once_and_an_untied_one_twice():
    untied = dataclasses.replace(SMOLLM2, tied=False)
    more = native_weight_bytes(untied, "float16") - native_weight_bytes(SMOLLM2, "float16")
    assert more == 2 * 49152 * 576
