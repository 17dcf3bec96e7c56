"""What `hortator status` says of memory."""

from deploy.status_memory import memory_lines
from services.worker.holdings import Holdings
from services.worker.memory.ledger import Ledger

MIB = 1 << 20
PREDICTED = Ledger(250 * MIB, 260 * MIB, 512 * MIB, 70 * MIB)


def rank(measured, warnings=()):
    told = None if measured is None else measured.as_dict()
    return {"predicted": PREDICTED.as_dict(), "measured": told, "warnings": list(warnings)}


def lines(*ranks):
    report = Holdings(ranks).report() | {"free_bytes": 3 << 30, "free_of": "available on this machine"}
    return memory_lines("w0", report)


def test_one_line_tells_classes_the_total_and_what_is_left():
    (line,) = lines(rank(PREDICTED))
    assert line == (
        "w0: memory: 1.1 GiB = runtime 250.0 MiB + weights 260.0 MiB + KV 512.0 MiB + activations 70.0 MiB; "
        "3.0 GiB available on this machine"
    )


def test_what_was_predicted_is_told_where_it_differs():
    (line,) = lines(rank(Ledger(250 * MIB, 260 * MIB, 512 * MIB, 71 * MIB)))
    assert "activations 71.0 MiB (predicted 70.0 MiB)" in line
    assert "KV 512.0 MiB +" in line


def test_a_wrong_prediction_is_a_line_of_its_own():
    assert "w0: memory was predicted wrongly: KV: too much" in lines(rank(PREDICTED, ["KV: too much"]))


def test_ranks_of_a_group_are_added_up_and_named_each():
    first, second = lines(rank(PREDICTED), rank(Ledger(1000 * MIB), ["total: more"]))[:2]
    assert first.startswith("w0: memory of 2 ranks: 2.0 GiB (predicted 2.1 GiB)")
    assert second == "w0: memory by rank: 0: 1.1 GiB, 1: 1000.0 MiB"
    assert lines(rank(PREDICTED), rank(PREDICTED, ["x"]))[-1] == "w0: memory was predicted wrongly: rank 1: x"


def test_without_a_system_that_tells_the_prediction_is_named_as_such():
    (line,) = lines(rank(None))
    assert "predicted, the system does not tell" in line


def test_an_instance_without_an_account_says_nothing():
    assert memory_lines("w0", {}) == []
    assert Holdings([]).report() == {}
