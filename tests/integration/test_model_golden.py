"""The default model's folder, as converted on this machine, against the reference outputs."""

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shared.model import ModelFolder, resolve

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return resolve("smol")


def test_the_tokenizer_built_from_the_gguf_gives_the_reference_ids_and_texts(folder):
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(folder.chat_template or "")
    for case in GOLDEN:
        if case["kind"] == "chat":
            messages = [{"role": "user", "content": case["prompt"]}]
            text = template.render(messages=messages, add_generation_prompt=True)
            assert tokenizer.encode(text, add_special_tokens=False).ids == case["ids"]
        if case["kind"] == "raw":
            assert tokenizer.encode(case["prompt"]).ids == case["ids"]
        assert tokenizer.decode(case["golden"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize(
    "text",
    [
        "héllo wörld",
        "日本語のテキスト",
        "🙂👩‍👩‍👧",
        "a\tb\r\n  c",
        "1234567 tokens",
        "<|im_start|>",
        "don't",
        "\x00\x7f",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(folder, text):
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reproduces_the_reference_tokens_from_the_converted_folder(folder):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    assert tokenizer.eos_token_id in folder.eos_ids
    for case in (GOLDEN[0], GOLDEN[4], GOLDEN[7]):
        ids = torch.tensor([case["ids"]])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(case["golden"]), do_sample=False
            )
        assert out[0, ids.shape[1] :].tolist() == case["golden"]
