"""The default model written as GGUF files of three types and served from them, against transformers."""

import json
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from shared.model import resolve
from shared.model.cache import ModelCache
from tests.support.gguf_files import write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_support import Driver, greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())
TOKENS = 16
HOSTILE = [
    "",
    " ",
    "   \n\n\t x",
    "\r\n\r\n",
    "héllo wörld, e\u0301 vs é",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧\ufe0f",
    "1234567 12 3.14 ²½ ١٢٣",
    "don't DON'T I'll we've",
    "<|im_start|>user<|im_end|><|endoftext|> <|im_start|",
    "\x00\x01\x7f\x80\u200b\u2028\ufeff",
    "\U0010ffff\ue000",
    "ĠĊ Ġ ▁",
    "a" * 300,
    " " * 100 + "x",
    "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass",
]


@pytest.fixture(scope="module")
def source():
    return resolve("smol")


@pytest.fixture(scope="module", params=[Kind.F16, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def served(request, source, tmp_path_factory):
    """(the transformers model with the values that were stored, the folder made of the file)"""
    import torch
    import transformers

    where = tmp_path_factory.mktemp("gguf")
    tokenizer = json.loads(source.tokenizer_file.read_text())
    said = json.loads((source.path / "tokenizer_config.json").read_text())
    ids = tokenizer["model"]["vocab"]

    def fill(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(sorted(ids, key=ids.__getitem__))
        control = {added["id"] for added in tokenizer["added_tokens"]}
        writer.add_token_types([3 if i in control else 1 for i in range(len(ids))])
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
        writer.add_bos_token_id(ids[said["bos_token"]])
        writer.add_eos_token_id(ids[said["eos_token"]])
        writer.add_add_bos_token(False)
        writer.add_chat_template(said["chat_template"])

    reference = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    write_model(where / "m.gguf", reference, request.param, "llama", fill)
    return reference, resolve(str(where / "m.gguf"), ModelCache(where / "cache"), quiet=True)


def test_tokenizer_and_template_are_the_originals(served, source):
    _, folder = served
    ours, original = (Tokenizer.from_file(str(f.tokenizer_file)) for f in (folder, source))
    for text in HOSTILE:
        assert ours.encode(text).ids == original.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert folder.chat_template == source.chat_template
    assert folder.eos_ids == source.eos_ids


def test_the_engine_gives_the_tokens_of_the_files_values(served):
    import torch

    from services.worker.engine.executor import EngineOptions, TorchExecutor

    reference, folder = served
    executor = TorchExecutor(
        folder.path, EngineOptions(dtype="float32", kv_bytes=100 << 20, max_len=512, measure_s=0.0)
    )
    prompts = [case["ids"][:300] for case in GOLDEN[:4]]
    runs = Driver(executor).generate(prompts, [greedy(TOKENS) for _ in prompts])
    executor.close()
    for prompt, run in zip(prompts, runs):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + run.tokens])).logits[0, len(prompt) - 1 : -1]
        assert run.tokens == logits.argmax(-1).tolist()
