"""Drives an executor as the worker does: slots, blocks and steps of several sequences.

Not a test: imported by the engine tests.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.step import PromptLogprobs, SlotArrays, StepInput, StepOutput, TokenLogprobs
from shared.wire import Sampling


@dataclass
class Run:
    """What came of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class Driver:
    """Runs prompts on an executor; blocks are handed out in a shuffled order."""

    def __init__(self, executor: Any, max_slots: int = 32, seed: int = 0) -> None:
        info = executor.info
        self.executor = executor
        self.block_tokens = info.block_tokens
        self.rng = np.random.default_rng(seed)
        self.free = [int(b) for b in self.rng.permutation(info.blocks_total)]
        width = -(-info.max_len // info.block_tokens)
        self.slots = SlotArrays(
            tokens=np.zeros((max_slots, info.max_len), np.int32),
            block_table=np.full((max_slots, width), -1, np.int32),
            computed=np.zeros(max_slots, np.int32),
            known=np.zeros(max_slots, np.int32),
            prompt_len=np.zeros(max_slots, np.int32),
            choice=np.zeros(max_slots, np.int32),
            sampling=[None] * max_slots,
            version=np.zeros(max_slots, np.int64),
        )

    def admit(
        self, slot: int, prompt: list[int], sampling: Sampling, choice: int = 0, output: tuple[int, ...] = ()
    ) -> None:
        s = self.slots
        ids = [*prompt, *output]
        s.tokens[slot, : len(ids)] = ids
        s.known[slot], s.prompt_len[slot], s.computed[slot] = len(ids), len(prompt), 0
        s.choice[slot], s.sampling[slot] = choice, sampling
        s.version[slot] += 1

    def release(self, slot: int) -> None:
        table = self.slots.block_table[slot]
        self.free += [int(b) for b in table[table >= 0]]
        table[:] = -1
        self.slots.sampling[slot] = None

    def step(self, counts: dict[int, int]) -> StepOutput:
        """Compute `counts[slot]` tokens of each slot and take the drawn tokens in."""
        s = self.slots
        order = sorted(counts)
        for slot in order:
            needed = -(-(int(s.computed[slot]) + counts[slot]) // self.block_tokens)
            held = int((s.block_table[slot] >= 0).sum())
            for i in range(held, needed):
                s.block_table[slot, i] = self.free.pop()
        slots = np.array(order, np.int32)
        todo = np.array([counts[slot] for slot in order], np.int32)
        starts = s.computed[slots].copy()
        out: StepOutput = self.executor.run(
            StepInput(slots, starts, todo, starts + todo == s.known[slots]), s
        )
        s.computed[slots] += todo
        for slot, token in zip(order, out.tokens):
            if token >= 0:
                s.tokens[slot, s.known[slot]] = token
                s.known[slot] += 1
        return out

    def generate(
        self,
        prompts: list[list[int]],
        samplings: list[Sampling],
        chunk: int = 512,
        stagger: int = 0,
        random_chunks: bool = False,
    ) -> list[Run]:
        """Run every prompt to max_tokens or a stop id in one batch; row i joins at step i × stagger."""
        runs = [Run() for _ in prompts]
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings)):
            self.admit(slot, prompt, sampling)
        live, number = set(range(len(prompts))), 0
        while live:
            counts = {}
            for slot in live:
                if slot * stagger > number:
                    continue
                left = int(self.slots.known[slot] - self.slots.computed[slot])
                most = int(self.rng.integers(1, chunk + 1)) if random_chunks else chunk
                counts[slot] = min(left, most)
            number += 1
            if not counts:
                continue
            out = self.step(counts)
            for row, slot in enumerate(sorted(counts)):
                if row in out.prompt_logprobs:
                    runs[slot].prompt_logprobs.append(out.prompt_logprobs[row])
                if out.tokens[row] == -1:
                    continue
                runs[slot].tokens.append(int(out.tokens[row]))
                if row in out.logprobs:
                    runs[slot].logprobs.append(out.logprobs[row])
                sampling = samplings[slot]
                ended = out.tokens[row] == -2 or out.tokens[row] in sampling.stop_token_ids
                if ended or len(runs[slot].tokens) >= sampling.max_tokens:
                    live.discard(slot)
                    self.release(slot)
        return runs


def greedy(max_tokens: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


def save_tiny(
    family: str, path: Path, seed: int = 0, broken_token: int | None = None, **overrides: Any
) -> Any:
    """A tiny random model of a family saved as a Hugging Face folder; returns the transformers model.

    The embedding of `broken_token` is not a number.
    """
    import torch
    import transformers

    kinds = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    sizes: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kinds[family](**(sizes | overrides)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
    if broken_token is not None:
        model.get_input_embeddings().weight.data[broken_token] = float("nan")
    model = model.float().eval()
    model.save_pretrained(path, safe_serialization=True)
    return model
