"""What the batch says of chains: where in its own each block is, and with which blocks sequences begin."""

import numpy as np

from services.worker.shape import BatchShape
from services.worker.slots import Batch
from services.worker.step import StepOutput
from shared.blocks import chain, root_hash
from shared.tier.frames import Link
from shared.wire import Admit, Sampling, Step, Work

SHAPE = BatchShape(max_slots=2, max_len=64, block_tokens=4, blocks_total=16, vocab_size=100)
IDS = list(range(14))
GREEDY = Sampling(max_tokens=8)


def frame(**content: object) -> Step:
    return Step(instance="w", epoch=1, owner="s", incarnation=1, seq=1, **content)  # type: ignore[arg-type]


def test_blocks_are_linked_to_those_before_them_and_reused_ones_are_named() -> None:
    batch = Batch(SHAPE, "fp")
    step = batch.apply(frame(admit=[Admit(0, 0, 14, IDS, 0, [3, 1, 4, 5], GREEDY)], work=[Work(0, 14)]))
    assert step.reused == []
    result = batch.commit(step, StepOutput(np.array([7], np.int32)))
    root = root_hash("fp", 4, "")
    hashes = chain(root, IDS, 4)
    assert [(row.block, row.hash) for row in result.stored] == list(zip([3, 1, 4], hashes, strict=True))
    parents = [root, *hashes]
    assert [batch.hashes.link(block) for block in (3, 1, 4)] == [Link(parents[n], n) for n in range(3)]
    step = batch.apply(frame(admit=[Admit(1, 0, 14, IDS, 8, [3, 1, 6, 7], GREEDY)], work=[Work(1, 6)]))
    assert step.reused == [list(zip([3, 1], hashes, strict=False))]
    # One that leaves is linked until its block holds another.
    batch.hashes.forget(4)
    assert batch.hashes.link(4) == Link(hashes[1], 2)
