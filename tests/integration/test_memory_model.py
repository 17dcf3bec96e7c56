"""The default model's ledger: what was predicted, what was measured, and what a real step came to."""

import pytest

from services.worker.memory.ledger import CLASSES
from tests.support.weighed import weighed

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MIB = 1 << 20
WITHIN = 0.03
TOLD = ("weights_bytes", "kv_bytes", "activation_bytes", "total_bytes")


@pytest.mark.parametrize("kv", [64, 256, 1024])
def test_a_ledger_predicted_is_within_3_percent_of_what_the_system_says(kv):
    found = weighed("smol", kv * MIB, dtype="float16", kv_dtype="float16", threads=2)
    off = {name: found["measured"][name] / found["predicted"][name] - 1 for name in TOLD}
    assert all(abs(share) <= WITHIN for share in off.values()), off
    assert found["measured"]["total_bytes"] == sum(found["measured"][name] for name in CLASSES)
    assert found["warnings"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "kv_dtype": "float32", "threads": 1},
        {"dtype": "int8", "kv_dtype": "float16", "threads": 2},
        {"dtype": "int8-dynamic", "kv_dtype": "float16", "threads": 2, "slots": 16},
    ],
)
def test_a_real_step_takes_no_more_than_the_account_says(options):
    found = weighed("smol", 128 * MIB, real=True, most_tokens=512, **options)
    total = found["measured"]["total_bytes"]
    assert abs(found["predicted"]["total_bytes"] / total - 1) <= WITHIN
    assert found["real_total_bytes"] <= total * (1 + WITHIN)
    assert found["real_total_bytes"] >= total * (1 - 2 * WITHIN)
