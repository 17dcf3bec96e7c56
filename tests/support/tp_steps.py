"""Steps of sequences for a tensor-parallel group's decoders, and models to compute them with."""

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from services.worker.engine.batch import RaggedBatch

BLOCK = 4


def cut(tokens: int, chunks: int) -> np.ndarray:
    """A plan of about equal chunks."""
    return np.linspace(0, tokens, min(tokens, chunks) + 1).astype(np.int32)


class Steps:
    """A few steps of a few sequences: chunks of prompts, then single tokens; all logits of prompts' ends."""

    def __init__(self, seed: int, vocab: int, sequences: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(6, 40, sequences)
        self.ids = [rng.integers(0, vocab, n + 2).astype(np.int32) for n in self.lengths]
        width = -(-(int(self.lengths.max()) + 2) // BLOCK)
        self.blocks = sequences * width
        self.table = rng.permutation(self.blocks).astype(np.int32).reshape(sequences, width)
        first = [int(rng.integers(1, n)) for n in self.lengths]
        ends = [first, self.lengths.tolist(), (self.lengths + 1).tolist(), (self.lengths + 2).tolist()]
        starts = [[0] * sequences, *ends[:-1]]
        self.batches = [self._batch(a, b) for a, b in zip(starts, ends)]

    def _batch(self, starts: list[int], ends: list[int]) -> RaggedBatch:
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends)]).astype(np.int32)
        counts = np.subtract(ends, starts)
        row_of = np.repeat(np.arange(len(counts)), counts)
        row_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return RaggedBatch(
            tokens=np.concatenate([ids[a:b] for ids, a, b in zip(self.ids, starts, ends)]),
            positions=positions,
            row_start=row_start,
            kv_len=np.array(ends, np.int32),
            block_table=self.table,
            write_block=self.table[row_of, positions // BLOCK],
            write_offset=positions % BLOCK,
            logit_tokens=row_start[1:] - 1,
        )


def joined(results: list[list[Any]]) -> list[Any]:
    """Ranks' logits of each step side by side."""
    return [torch.cat(parts, dim=1) for parts in zip(*results)]


ARCHITECTURES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "family": st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
        "num_key_value_heads": st.integers(1, 4),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([16, 32, 64]),
        "panels": st.integers(1, 3),
        "intermediate_size": st.integers(60, 200),
        "num_hidden_layers": st.integers(1, 3),
        "vocab_size": st.integers(60, 400),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
    }
)


def family_and_sizes(architecture: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One of `ARCHITECTURES` for `save_tiny`."""
    sizes = dict(architecture, initializer_range=0.1)
    family, group, panels = (sizes.pop(name) for name in ("family", "group", "panels"))
    heads = sizes["num_attention_heads"] = sizes["num_key_value_heads"] * group
    # transformers wants a multiple of the heads, the kernels one of 16.
    sizes["hidden_size"] = math.lcm(heads, 16) * panels
    if family in ("mistral", "qwen2"):
        del sizes["attention_bias"]
    return family, sizes
