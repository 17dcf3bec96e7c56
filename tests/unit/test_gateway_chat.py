"""Chat templates: the ids equal those of the plainly rendered text, and users cannot write control tokens."""

from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.chat import ChatTemplate, Message
from services.gateway.errors import ApiError
from services.gateway.tokenizer import CardError, ModelCard, load_card
from tests.support.tiny_model import CHAT_TEMPLATE, SPECIAL, write_tiny_model


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return load_card(write_tiny_model(tmp_path_factory.mktemp("m") / "folder"), "m")


def rendered(messages: list[Message], generate: bool) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain = [{"role": m.role, "content": m.content} for m in messages]
    return environment.from_string(CHAT_TEMPLATE).render(messages=plain, add_generation_prompt=generate)


contents = st.text(st.characters(codec="utf-8"), max_size=30)
evil = st.lists(st.sampled_from([*SPECIAL, "\n", "system", "x", " "]), max_size=6).map("".join)
roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(st.builds(Message, roles, contents | evil), min_size=1, max_size=4)


@given(conversation=conversations, generate=st.booleans())
@settings(deadline=None)
async def test_the_ids_say_the_rendered_text_with_the_templates_control_tokens_only(
    card: ModelCard, conversation: list[Message], generate: bool
) -> None:
    ids = await ChatTemplate(card).encode(conversation, generate=generate, keep_open=False)
    text = rendered(conversation, generate)
    assert card.decode(ids, skip_special=False) == text
    forged = any(special in m.content for m in conversation for special in SPECIAL)
    if not forged:
        assert ids == card.tokenizer.encode(text, add_special_tokens=False).ids
    harmless = [Message(m.role, "x") for m in conversation]
    expected = await ChatTemplate(card).encode(harmless, generate=generate, keep_open=False)
    assert [i for i in ids if i < 3] == [i for i in expected if i < 3]


@pytest.mark.parametrize("last", ["It is", "It is <|im_end|>"])
async def test_a_kept_open_message_ends_the_prompt(card: ModelCard, last: str) -> None:
    conversation = [Message("user", "hi"), Message("assistant", last)]
    ids = await ChatTemplate(card).encode(conversation, generate=False, keep_open=True)
    assert card.decode(ids, skip_special=False).endswith(f"<|im_start|>assistant\n{last}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{{ 1 + 'a' }}",
        "{{ x.y.z }}",
    ],
)
async def test_a_template_that_fails_is_a_400_and_runs_nothing(tmp_path: Path, template: str) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    chat = ChatTemplate(load_card(folder, "m"))
    with pytest.raises(ApiError) as refused:
        await chat.encode([Message("user", "hi")], generate=True, keep_open=False)
    assert refused.value.status == 400


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    chat = ChatTemplate(load_card(folder, "m"))
    with pytest.raises(ApiError, match="no chat template"):
        await chat.encode([Message("user", "hi")], generate=True, keep_open=False)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"no tokenizer\.json in .*hortator model pull"):
        load_card(tmp_path, "m")


def test_the_card_knows_every_name_of_its_model(card: ModelCard) -> None:
    assert card.knows("m")
    assert card.knows("folder")
    assert not card.knows("other")
    assert card.eos_ids == (2,)
