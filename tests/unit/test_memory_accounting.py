"""The account of a rank: small models on this CPU, and a device that only says what it was told to."""

from types import SimpleNamespace

import pytest
import torch

from services.worker.compute import Compute
from services.worker.engine import accounting
from services.worker.engine.accounting import Account, Found, Rank, weigh
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.native.decoder import NativeDecoder
from services.worker.engine.worst import longest_batch, widest_batch
from services.worker.memory.ledger import CLASSES, Ledger
from services.worker.memory.served import Load, predict_rank
from services.worker.parallel.split import plan_shards
from services.worker.shape import BatchShape
from services.worker.slots import Batch
from tests.unit.engine_support import Driver, greedy, save_tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny("llama", path)
    return path


def engine(folder, kernels, **more):
    options = {"dtype": "float32", "kv_bytes": 8 * MIB, "kernels": kernels, "measure_s": 0.0, "threads": 1}
    return TorchExecutor(folder, EngineOptions(**(options | {"runtime_bytes": 0} | more)))


def native_or_skip(executor):
    if not isinstance(executor._decoder, NativeDecoder):
        pytest.skip("native kernels cannot compute this model here")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_account_names_every_class_and_does_not_change_what_is_computed(folder, kernels):
    plain = engine(folder, kernels, runtime_bytes=None)
    weighed = engine(folder, kernels)
    account = weighed.account
    assert plain.account is None
    assert plain.memory() == {}
    assert account is not None
    assert account.measured is not None
    assert account.measured.kv_bytes == weighed.kv.data.nbytes == weighed.kv.resident_bytes
    assert set(weighed.memory()) == {"predicted", "measured", "warnings"}
    tokens = [Driver(each).generate([[1, 2, 3]], [greedy(6)])[0].tokens for each in (plain, weighed)]
    assert tokens[0] == tokens[1]


def test_native_weights_are_predicted_to_the_byte(folder):
    executor = engine(folder, "auto")
    native_or_skip(executor)
    assert executor.account is not None
    assert executor.account.measured is not None
    assert executor.account.predicted.weights_bytes == executor.account.measured.weights_bytes


def test_a_rank_without_an_account_makes_the_instance_tell_none(folder):
    executor = engine(folder, "auto", runtime_bytes=None)
    info = executor.info
    shape = BatchShape(4, info.max_len, info.block_tokens, info.blocks_total, info.vocab_size)
    assert Compute(executor, Batch(shape, info.fingerprint)).memory() == []
    told = Compute(engine(folder, "auto"), Batch(shape, info.fingerprint)).memory()
    assert [sorted(rank) for rank in told] == [["measured", "predicted", "warnings"]]


@pytest.mark.parametrize(
    ("tokens", "slots", "max_len", "size"),
    [(64, 8, 1000, 64), (64, 8, 4, 32), (3, 8, 100, 3), (40, 2, 30, 40)],
)
def test_the_widest_batch_has_all_tokens_a_step_may_have_and_a_token_drawn_for_every_slot(
    tokens, slots, max_len, size
):
    batch = widest_batch(tokens, slots, max_len, 16)
    assert batch.size == size
    assert batch.rows == len(batch.logit_tokens) == min(slots, tokens)
    assert batch.kv_len.max() <= max_len
    assert (batch.row_start[1:] > batch.row_start[:-1]).all()


def test_the_longest_batch_ends_where_the_longest_sequence_ends():
    batch = longest_batch(10, 100, 16)
    assert (batch.positions[0], batch.kv_len[0], batch.block_table.shape) == (90, 100, (1, 7))


class Cuda:
    """`torch.cuda` of a device on which so much is allocated, at the most so much in the step."""

    def __init__(self, allocated, peak, reserved, free, whole):
        self._allocated, self._peak = allocated, peak
        self._reserved, self._free, self._whole = reserved, free, whole
        self.marked = False

    def synchronize(self, device): ...

    def memory_allocated(self, device):
        return self._allocated

    def reset_peak_memory_stats(self, device):
        self.marked = True

    def max_memory_allocated(self, device):
        assert self.marked
        return self._peak

    def memory_reserved(self, device):
        return self._reserved

    def mem_get_info(self, device):
        return self._free, self._whole


class DeviceDecoder:
    """A decoder that computes nothing, with the logits it would have."""

    def __init__(self, vocab):
        self._vocab = vocab

    def forward(self, batch):
        return torch.zeros(len(batch.logit_tokens), self._vocab)


def test_on_a_device_the_allocator_tells_and_what_it_does_not_know_of_is_the_runtime(folder, monkeypatch):
    config = engine(folder, "auto").config
    shard = plan_shards(config, 1).shards[0]
    load = Load("float16", "float16", blocks=10, block_tokens=16, kernels="cuda", step_tokens=32, slots=4)
    data = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    kv = SimpleNamespace(data=data, block_tokens=16, populate=lambda: None)
    fake = Cuda(allocated=900, peak=1300, reserved=1500, free=4000, whole=8000)
    monkeypatch.setattr(accounting, "cuda", fake)
    rank = Rank(DeviceDecoder(config.vocab_size), kv, config, shard, load, lambda logits, rows: None, 1e5)
    assert weigh(rank, Found(before=100, with_kv=300)) == Ledger(
        runtime_bytes=8000 - 4000 - 1500,
        weights_bytes=900 - 300,
        kv_bytes=300 - 100,
        activation_bytes=1300 - 900,
        workspace_bytes=0,
    )


def test_a_system_that_does_not_tell_leaves_the_prediction(folder, monkeypatch):
    def nothing():
        raise OSError("no /proc here")

    monkeypatch.setattr(accounting, "resident", nothing)
    monkeypatch.setattr("services.worker.engine.resident.resident", nothing)
    account = engine(folder, "torch").account
    assert account is not None
    assert account.measured is None
    assert account.as_dict()["measured"] is None
    assert account.warnings() == []


def test_a_wrong_prediction_is_a_warning_in_words():
    account = Account(Ledger(weights_bytes=100 * MIB), Ledger(weights_bytes=200 * MIB))
    assert [text.split(":")[0] for text in account.warnings()] == ["weights", "total"]


def test_every_class_of_a_device_is_predicted(folder):
    config = engine(folder, "auto").config
    load = Load("float16", "float16", blocks=10, block_tokens=16, kernels="cuda", runtime_bytes=5)
    predicted = predict_rank(config, plan_shards(config, 1).shards[0], load)
    assert all(
        getattr(predicted, name) > 0 for name in CLASSES if name not in ("workspace_bytes", "staging_bytes")
    )
