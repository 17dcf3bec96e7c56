"""Blocks as bytes: the engine's, whose views are what steps compute in, and the mock's, which are checked."""

import numpy as np
import pytest
import torch
from random_frames import SHAPE, frame

from services.worker.engine.config import parse_config
from services.worker.engine.kvcache import KvCache, plan_kv
from services.worker.engine.kvmemory import kv_memory_of
from services.worker.mock import MockCosts, MockExecutor
from services.worker.mock_kv import WrongKv
from services.worker.slots import Batch
from services.worker.step import ExecutorInfo
from services.worker.tier.port import HasKvMemory
from shared.wire import Admit, Fetch, Sampling, Work

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    },
    "config.json",
)

INFO = ExecutorInfo("fp", SHAPE.block_tokens, SHAPE.blocks_total, SHAPE.max_len, SHAPE.vocab_size, 0, 0)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_a_view_of_a_block_is_its_live_memory_and_a_write_replaces_only_that_block(kv_dtype: str) -> None:
    plan = plan_kv(CONFIG, kv_dtype, 1 << 20, 4)
    kv = KvCache(CONFIG, plan, kv_dtype, torch.device("cpu"))
    memory = kv_memory_of(kv)
    assert memory.block_bytes == plan.block_bytes
    kv.data[:8] = 1
    view = memory.view(3)
    assert view.nbytes == plan.block_bytes
    kv.data[3] = 2
    assert bytes(view) == kv.data[3].numpy().tobytes()
    memory.write(5, view)
    assert [float(kv.data[block].float().mean()) for block in range(8)] == [1, 1, 1, 2, 1, 2, 1, 1]


def admission(ids: list[int], computed: int, blocks: list[int], slot: int = 0) -> Admit:
    return Admit(slot, 0, len(ids), ids, computed, blocks, Sampling(max_tokens=10, seed=1))


def test_a_mock_goes_on_from_blocks_brought_back_and_refuses_those_of_another_prefix() -> None:
    batch, executor = Batch(SHAPE, "fp"), MockExecutor(INFO, SHAPE.max_slots, MockCosts(token_s=1e-6))
    assert isinstance(executor, HasKvMemory)
    memory = executor.kv_memory
    assert memory is not None
    ids = list(range(10, 20))

    def run(**content: object) -> list[bytes]:
        work = batch.apply(frame(**content))
        return [row.hash for row in batch.commit(work, executor.run(work, batch.arrays)).stored]

    hashes = run(admit=[admission(ids, 0, [0, 1, 2])], work=[Work(0, 10)])
    kept = [bytes(memory.view(block)) for block in (0, 1)]
    run(release=[0], fetch=[Fetch(1, "tier-a", [4, 5], hashes)])
    for block, content in zip((4, 5), kept):
        memory.write(block, memoryview(content))
    assert batch.fetched(1, 2)
    run(admit=[admission(ids, 8, [4, 5, 6])], work=[Work(0, 2)])
    run(release=[0])
    memory.write(5, memoryview(kept[0]))
    with pytest.raises(WrongKv, match="slot 0: block 5, number 1 of its table"):
        run(admit=[admission(ids, 8, [4, 5, 7])], work=[Work(0, 2)])
    assert np.frombuffer(kept[0], np.int64)[0] != np.frombuffer(kept[1], np.int64)[0]
