"""Into how many chunks a group's prompts are cut on devices: by what passes and sums are measured to take."""

import numpy as np
import torch

from services.worker.collective.port import Collective
from services.worker.collective.tensors import Laps
from services.worker.engine.batch import one_sequence
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.kvcache import KvCache
from services.worker.engine.tuning import link_of, work_of
from services.worker.parallel.crossover import CrossoverTable
from services.worker.parallel.overlap import Costs, Planner
from services.worker.step import I32

ROWS = (1, 256, 2048)
"""Tokens of the passes that tell what computing costs: one, few, many."""
TILE = 128
"""Rows that matrix kernels of devices multiply at once."""
_MESSAGE_S = 5e-6
"""Computing time a message takes, events between streams and the addition included; a guess."""
_REPEATS = 3


def plan_by_measuring(
    decoder: CudaDecoder, kv: KvCache, collective: Collective, table: CrossoverTable | None
) -> Costs:
    """Measure, and have `decoder` cut its steps by what was found, which is returned; the same on all ranks.

    Writes into block 0 onwards. Raises `GroupLost`.
    """
    costs = measure_costs(decoder, kv, collective, table)
    planner = Planner(costs)

    def plan(tokens: int) -> I32:
        return np.array(planner.plan(tokens), np.int32)

    decoder.plan = plan
    return costs


def measure_costs(
    decoder: CudaDecoder, kv: KvCache, collective: Collective, table: CrossoverTable | None
) -> Costs:
    """Of passes without their sums, on the slowest rank, and of sums by `table`."""
    c = decoder.config
    sizes = sorted({min(rows, kv.blocks * kv.block_tokens, c.max_len) for rows in ROWS})
    mine = np.array([_layer_s(decoder, kv, rows) for rows in sizes])
    slowest = collective.gather(mine.view(np.uint8)).view(np.float64).max(axis=0)
    # Rank 0's, as shares differ where the split is uneven.
    attend = (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    own = np.array([attend / (attend + 3 * c.intermediate)])
    share = float(collective.gather(own.view(np.uint8))[0].view(np.float64)[0])
    row_bytes = c.hidden * decoder.message_bytes
    return Costs(
        layers=c.layers,
        attend=work_of({rows: share * float(s) for rows, s in zip(sizes, slowest)}),
        feed=work_of({rows: (1 - share) * float(s) for rows, s in zip(sizes, slowest)}),
        link=link_of(table, row_bytes, max(sizes) * row_bytes),
        row_bytes=row_bytes,
        message_s=_MESSAGE_S,
        tile=TILE,
    )


@torch.inference_mode()
def _layer_s(decoder: CudaDecoder, kv: KvCache, rows: int) -> float:
    """Seconds of one layer for so many tokens of one sequence, sums left out."""
    batch = one_sequence(0, rows, kv.block_tokens)
    laps = Laps(kv.data.device)
    for _ in range(_REPEATS + 2):
        decoder.forward_unsummed(batch)
        laps.mark()
    return min(laps.seconds()[1:]) / decoder.config.layers
