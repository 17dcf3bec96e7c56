"""Plans: known ledgers, predicted times against measured ones, options side by side, one recommendation."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory.devices import CPU_REACH, SHEET, BadDevice, Device, find_device
from services.worker.memory.footprint import Case, Demand, Layout, ledgers
from services.worker.memory.ledger import CLASSES
from services.worker.memory.model_config import read_sizes
from services.worker.memory.options import COMFORT, max_concurrency, option, options
from services.worker.memory.plan import Plan, make_plan
from services.worker.memory.sizes import ModelSizes, sizes_of_numbers, sizes_of_parameters
from services.worker.memory.speed import message_s, predict_speed


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int = 128256, **more: Any
) -> ModelSizes:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
    return read_sizes(raw | more, "config.json")


SMOL = llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True)
LLAMA_8B = llama(4096, 14336, 32, 32, 8)
LLAMA_70B = llama(8192, 28672, 80, 64, 8)

MEASURED_CPU = Device(
    name="the machine of docs/benchmarks.md",
    memory_bytes=24 << 30,
    read_b_s=21.9e9,
    flop_s=67e9,
    flop8_s=80e9,
    link_b_s=0.125e9,
    link_s=100e-6,
    kind="cpu",
    runtime_bytes=300 << 20,
    threads=2,
    reach=CPU_REACH,
)
"""Rates as `hortator profile engine` printed them beside the steps below."""


def demand(concurrency: int = 32, context: int = 2048, output: int = 0, **more: Any) -> Demand:
    given: dict[str, Any] = {"dtype": "float16", "kv_dtype": "float16"} | more
    return Demand(concurrency, context, output or context // 5, **given)


def planned(model: ModelSizes, device: str, count: int = 1, **load: Any) -> Plan:
    return make_plan(Case(model, find_device(device), demand(**load), count))


def smol(concurrency: int = 32, context: int = 2048, output: int = 0, **more: Any) -> Case:
    return Case(SMOL, MEASURED_CPU, demand(concurrency, context, output, **more))


# Ledgers


@pytest.mark.parametrize(("count", "weights"), [(10**10, 20e9), (10**11, 200e9)])
def test_16_bit_weights_take_two_bytes_a_parameter(count: int, weights: float) -> None:
    ledger = planned(sizes_of_parameters(count), "H200").ledger
    assert ledger.weights_bytes == weights


@pytest.mark.parametrize(("reserved", "kv"), [(0, 125_829_120_000), (8192, 503_316_480_000)])
def test_kv_without_grouped_heads_is_what_the_issue_says(reserved: int, kv: int) -> None:
    model = sizes_of_numbers(60, 8000, None, None, None)
    assert planned(model, "H200", concurrency=32, context=2048, reserved=reserved).ledger.kv_bytes == kv


@settings(deadline=None)
@given(tp=st.integers(1, 9), sequences=st.integers(1, 64))
def test_ranks_together_hold_all_weights_and_kv_and_only_vectors_twice(tp: int, sequences: int) -> None:
    alone = ledgers(smol(sequences, 512), Layout())[0]
    ranks = ledgers(smol(sequences, 512), Layout(tp=tp))
    assert len(ranks) == tp
    matrices = 2 * SMOL.parameters.matrices
    assert matrices <= sum(rank.weights_bytes for rank in ranks)
    # A KV head that two ranks read is kept by both, with the weights that make it.
    assert sum(rank.kv_bytes for rank in ranks) <= alone.kv_bytes * max(1, tp / 3 + 1)
    assert max(rank.weights_bytes for rank in ranks) <= alone.weights_bytes


@settings(deadline=None)
@given(stages=st.integers(1, 30))
def test_stages_hold_every_layer_once(stages: int) -> None:
    ranks = ledgers(smol(4, 512), Layout(stages=stages))
    whole = 2 * SMOL.parameters.matrices + 4 * SMOL.parameters.vectors
    again = 2 * SMOL.parameters.embedding if stages > 1 else whole // 20  # the tied head; tables
    assert whole <= sum(rank.weights_bytes for rank in ranks) + stages <= whole + again + 2 * stages
    assert sum(rank.kv_bytes for rank in ranks) == 4 * 512 * 23_040


@pytest.mark.parametrize("device", [d.name for d in SHEET])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_highest_concurrency_fits_and_one_more_does_not(device: str, tp: int) -> None:
    def case(sequences: int) -> Case:
        return Case(LLAMA_8B, find_device(device), demand(sequences, 1024))

    most = max_concurrency(case(1), Layout(tp=tp))
    if not most:
        assert not option(case(1), Layout(tp=tp)).fits
        return
    assert option(case(most), Layout(tp=tp)).fits
    assert not option(case(int(most * 1.01) + 2), Layout(tp=tp)).fits


# Times


@pytest.mark.parametrize(
    ("sequences", "measured_s"), [(1, 0.0163), (8, 0.0520), (32, 0.167)], ids=["1", "8", "32"]
)
def test_a_decode_step_takes_what_was_measured(sequences: int, measured_s: float) -> None:
    speed = predict_speed(smol(sequences, 300), Layout())
    assert speed is not None
    assert speed.decode.step_s == pytest.approx(measured_s, rel=0.08)


def test_a_prompt_takes_what_was_measured() -> None:
    speed = predict_speed(smol(1, 257, 1), Layout())
    assert speed is not None
    assert speed.ttft_s == pytest.approx(0.830, rel=0.05)


@pytest.mark.parametrize(("clients", "measured"), [(1, 32.3), (8, 49.8), (32, 52.7)])
def test_served_tokens_a_second_are_what_the_mesh_reached(clients: int, measured: float) -> None:
    speed = predict_speed(smol(clients, 320, 64), Layout())
    assert speed is not None
    assert speed.tok_s == pytest.approx(measured, rel=0.05)


def test_a_sum_between_islands_goes_by_the_network() -> None:
    h100 = find_device("H100")
    assert message_s(h100, 1, 1e6) == 0
    assert message_s(h100, 16, 1e6) > 3 * message_s(h100, 8, 1e6)


@pytest.mark.parametrize("device", ["H100", "L4"])
def test_more_ranks_divide_computing_and_never_messages(device: str) -> None:
    found = [
        predict_speed(Case(LLAMA_70B, find_device(device), demand(16, 1024)), Layout(tp=tp))
        for tp in (1, 2, 4, 8)
    ]
    computing = [speed.decode.compute_s for speed in found if speed]
    messages = [speed.decode.communication_s for speed in found if speed]
    assert computing == sorted(computing, reverse=True)
    assert messages[0] == 0
    assert messages[1:] == sorted(messages[1:])


def test_a_pipeline_makes_no_step_shorter() -> None:
    case = Case(LLAMA_70B, find_device("H100"), demand(16, 1024))
    alone = predict_speed(case, Layout())
    staged = predict_speed(case, Layout(stages=4))
    assert alone is not None
    assert staged is not None
    assert staged.decode.step_s >= 0.8 * alone.decode.step_s


# Options and recommendations


def test_data_tensor_and_pipeline_parallel_stand_side_by_side() -> None:
    found = options(Case(LLAMA_8B, find_device("H100"), demand(), 4))
    layouts = [(o.layout.replicas, o.layout.tp, o.layout.stages) for o in found]
    whole = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)]
    assert layouts == whole
    assert all(o.served == (o.layout.stages == 1) for o in found)


def test_one_device_is_enough_where_the_load_fits_it() -> None:
    plan = planned(SMOL, "H200", count=4)
    assert plan.recommendation.kind == "one device"
    assert "do not distribute" in plan.recommendation.sentence
    said = " ".join(plan.recommendation.reasons)
    assert "more ranks do not pay" in said
    assert "3 of the 4 are not needed" in said


def test_a_model_larger_than_a_device_is_split_over_the_fewest_that_hold_it() -> None:
    plan = planned(LLAMA_70B, "H100", count=8, concurrency=16, context=2048)
    assert plan.recommendation.kind == "tensor parallel"
    assert plan.planned.layout == Layout(tp=4)
    assert "4 of the 8 are not needed" in " ".join(plan.recommendation.reasons)
    assert any("one device alone does not fit" in reason for reason in plan.recommendation.reasons)


def test_what_does_not_fit_is_told_how_many_devices_it_needs() -> None:
    plan = planned(LLAMA_70B, "A100-80", concurrency=8, context=1024)
    advice = plan.recommendation
    assert (advice.kind, advice.needs, advice.option) == ("does not fit", 2, None)
    assert "needs 2 of them" in advice.sentence
    assert planned(LLAMA_70B, "A100-80", 2, concurrency=8, context=1024).planned.fits


@settings(deadline=None, max_examples=40)
@given(
    concurrency=st.integers(1, 400),
    context=st.sampled_from([256, 1024, 4096]),
    device=st.sampled_from(["A10", "L40S", "H100"]),
)
def test_the_devices_it_is_said_to_need_are_enough(concurrency: int, context: int, device: str) -> None:
    plan = planned(LLAMA_8B, device, concurrency=concurrency, context=context)
    if plan.recommendation.option is None and (needs := plan.recommendation.needs) is not None:
        assert any(
            o.fits and o.served
            for o in planned(LLAMA_8B, device, needs, concurrency=concurrency, context=context).options
        )


def test_as_many_instances_as_just_hold_the_load_are_an_option() -> None:
    alone = planned(LLAMA_8B, "A100-80", context=4096, concurrency=1)
    most = alone.planned.max_concurrency
    assert most is not None
    plan = planned(LLAMA_8B, "A100-80", count=16, context=4096, concurrency=5 * most)
    assert plan.planned.layout.devices <= 5
    assert Layout(5) in [option.layout for option in plan.options]


def test_a_plan_that_leaves_no_room_does_not_fit_comfortably() -> None:
    a10 = find_device("A10")
    taken = option(Case(LLAMA_8B, a10, demand(8, 1024)), Layout()).fullest.total_bytes
    full = replace(a10, memory_bytes=int(taken / 0.97))
    plan = make_plan(Case(LLAMA_8B, full, demand(8, 1024)))
    assert not plan.planned.fits
    assert plan.planned.verdict == "does not fit comfortably"
    assert any("preempted" in reason for reason in plan.recommendation.reasons)
    assert any("would fit (--concurrency" in reason for reason in plan.recommendation.reasons)


def test_slow_steps_are_divided_over_instances_or_ranks_until_they_are_short_enough() -> None:
    alone = planned(LLAMA_8B, "H100", concurrency=64, context=2048)
    step_s = alone.planned.step_s
    assert alone.planned.layout.devices == 1
    split = planned(LLAMA_8B, "H100", count=4, gap_s=0.7 * step_s, concurrency=64, context=2048)
    assert split.planned.layout.devices > 1
    assert split.planned.step_s <= 0.7 * step_s


@pytest.mark.parametrize("degree", [1, 3, 5, 9])
def test_a_degree_that_is_asked_for_is_the_one_planned(degree: int) -> None:
    plan = make_plan(smol(4, 512), tp=degree)
    assert plan.planned.layout == Layout(tp=degree)
    assert len(plan.planned.ranks) == degree


def test_a_degree_that_the_model_cannot_be_split_into_is_refused() -> None:
    with pytest.raises(ValueError, match="only 9 query heads"):
        make_plan(smol(4, 512), tp=10)


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(
        [SMOL, LLAMA_8B, LLAMA_70B, sizes_of_parameters(10**10), sizes_of_numbers(8, 1024, 8, 2, 10**8)]
    ),
    device=st.sampled_from([*(d.name for d in SHEET)]),
    count=st.integers(1, 24),
    concurrency=st.integers(1, 300),
    context=st.integers(1, 8192),
)
def test_every_plan_adds_up_and_is_plain_data(
    model: ModelSizes, device: str, count: int, concurrency: int, context: int
) -> None:
    plan = make_plan(Case(model, find_device(device), demand(concurrency, context, 1), count))
    plain = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert set(plain["ledger"]) == {*CLASSES, "total_bytes"}
    for name in plain["ledger"]:
        assert plain["ledger"][name] == sum(rank[name] for rank in plain["ranks"])
    assert len(plain["ranks"]) == plan.planned.layout.devices <= max(count, 1)
    assert plain["fits"] == (plan.planned.used <= COMFORT)
    for made in plan.options:
        assert made.layout.devices <= count
        if made.speed is not None:
            assert 0 < made.step_s < 1e4
            assert made.tok_s <= made.speed.decode_tok_s * made.layout.replicas * 1.0001


# Devices


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("NVIDIA H200", "H200"), ("h100", "H100"), ("H100 SXM", "H100"), ("H100 PCIe", "H100-PCIe")),
        *(("A100", "A100-80"), ("A100 40GB", "A100-40"), ("NVIDIA A100-80GB-PCIe", "A100-80-PCIe")),
        *(("GeForce RTX 4090", "RTX4090"), ("AMD Instinct MI300X", "MI300X"), ("Tesla T4", "T4")),
    ],
)
def test_devices_are_found_by_the_names_people_give_them(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_an_unknown_device_is_answered_with_those_known() -> None:
    with pytest.raises(BadDevice, match=r"H200.*\.json"):
        find_device("GTX 480")
