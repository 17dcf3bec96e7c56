"""Whether a plan fits, decided before anything is loaded; and KV memory of what is left."""

import json
import re
from dataclasses import replace

import pytest

from services.worker.engine.resident import Room
from services.worker.fit import fitted
from services.worker.settings import WorkerSettings
from shared.runtime.settings import CannotStart, SettingsError, parse_size

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
BLOCK = 2 * 30 * 3 * 64 * 2 * 16


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return WorkerSettings(model_dir=str(tmp_path), block_tokens=16, threads=2, tier_staging="64MiB")


def fit(settings, mib):
    return fitted(settings, lambda: 256 * MIB, lambda: Room(mib * MIB, "available on this machine"))


def test_what_fits_is_left_as_it_is(settings):
    assert fit(settings, 2000) == settings


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_what_would_fit(settings):
    with pytest.raises(CannotStart) as refused:
        fit(settings, 800)
    text = str(refused.value)
    for part in ("runtime 256.0 MiB", "weights 258.6 MiB", "KV 511.9 MiB", "800.0 MiB are available on this"):
        assert part in text
    advised = re.search(r"lower --kv-memory to ([\d.]+ MiB)", text)
    assert advised, text
    assert fit(replace(settings, kv_memory=f"{float(advised[1].split()[0]) - 1}MiB"), 800)


def test_weights_that_do_not_fit_are_no_matter_of_kv_memory(settings):
    with pytest.raises(CannotStart, match="smaller --dtype, or a smaller model"):
        fit(settings, 400)


@pytest.mark.parametrize("mib", [900, 2000, 30_000])
def test_auto_takes_whole_blocks_of_what_is_left_and_what_it_takes_fits(settings, mib):
    found = fit(replace(settings, kv_memory="auto"), mib)
    kv = parse_size("kv_memory", found.kv_memory)
    assert kv % BLOCK == 0
    assert fit(found, mib) == found
    more = replace(found, kv_memory=str(kv + mib * MIB // 10))
    with pytest.raises(CannotStart):
        fit(more, mib)


def test_auto_with_nothing_left_is_refused(settings):
    with pytest.raises(CannotStart, match="nothing is left for KV"):
        fit(replace(settings, kv_memory="auto"), 600)


def test_a_limit_that_is_given_counts_where_it_is_lower(settings):
    with pytest.raises(CannotStart, match="what HORTATOR_MEMORY allows"):
        fit(replace(settings, memory="700MiB"), 2000)
    assert fit(replace(settings, memory="3GiB"), 2000).memory == "3GiB"
    small = fit(replace(settings, memory="1GiB", kv_memory="auto"), 30_000)
    assert parse_size("kv_memory", small.kv_memory) < 512 * MIB


def test_ranks_of_a_group_on_one_machine_are_added_up(settings):
    with pytest.raises(CannotStart, match=r"the 2 ranks here would take runtime 512\.0 MiB"):
        fit(replace(settings, tp=2), 1100)
    alone = parse_size("kv_memory", fit(replace(settings, kv_memory="auto"), 4000).kv_memory)
    group = parse_size("kv_memory", fit(replace(settings, kv_memory="auto", tp=2), 4000).kv_memory)
    assert group < alone


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_memory": "auto", "mock": True}, "needs a model"),
        ({"kv_memory": "auto", "device": "cuda:0"}, "for CPUs"),
        ({"kv_memory": "auto", "tp": 2, "nodes": 2, "rendezvous": "a:1"}, "nodes cannot know"),
        ({"memory": "lots"}, "memory='lots'"),
    ],
)
def test_auto_that_cannot_be_known_is_refused_in_words(settings, changes, says):
    with pytest.raises(SettingsError, match=says):
        fit(replace(settings, **changes), 4000)


def test_a_folder_that_cannot_be_read_is_left_to_who_loads_it(settings, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert fit(settings, 1) == settings


def test_a_mock_takes_no_memory_that_would_count(settings):
    assert fit(replace(settings, mock=True), 1).mock
