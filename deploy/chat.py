"""`hortator chat`: talk to a served model in the terminal, over the HTTP API."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import orjson
import typer
from rich.console import Console

from deploy.bench.client import RequestFailed, Target, described, exchange
from deploy.bench.runner import served_model
from deploy.bench.sse import BadResponse, EventParser

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HELP = "/reset forgets the conversation, /system TEXT sets instructions, /exit ends; Ctrl-C stops an answer"

_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""For str.translate: drops what could steer a terminal."""


@dataclass
class Conversation:
    """The messages so far. An answer that was stopped stays as far as it came."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()

    def as_request(self) -> list[dict[str, str]]:
        start = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.messages


@dataclass(frozen=True)
class Settings:
    """What every answer of a session is drawn with; None leaves it to the server."""

    max_tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    timeout_s: float = 600.0


class Answerer(Protocol):
    """Streams one answer: calls `on_text` with each piece. Raises RequestFailed."""

    async def __call__(self, messages: list[dict[str, str]], on_text: Callable[[str], None]) -> None: ...


@dataclass(frozen=True)
class HttpAnswerer:
    """/v1/chat/completions of an OpenAI-compatible server, streamed."""

    target: Target
    settings: Settings

    async def __call__(self, messages: list[dict[str, str]], on_text: Callable[[str], None]) -> None:
        body: dict[str, Any] = {
            "model": self.target.model,
            "messages": messages,
            "max_tokens": self.settings.max_tokens,
            "stream": True,
        }
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature
        if self.settings.seed is not None:
            body["seed"] = self.settings.seed
        events = EventParser()
        whole = False

        def on_body(_now: float, data: bytes) -> bool:
            nonlocal whole
            for payload in events.feed(data):
                if payload == b"[DONE]":
                    whole = True
                    return True
                event = orjson.loads(payload)
                if event.get("error"):
                    raise BadResponse(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        on_text(piece)
            return False

        await exchange(self.target, "/v1/chat/completions", body, on_body, self.settings.timeout_s)
        if not whole:
            raise RequestFailed("the answer broke off")


async def answer_line(
    line: str, talk: Conversation, answer: Answerer, write: Callable[[str], None], say: Callable[[str], None]
) -> bool:
    """Take one line of input: a command or a question. False ends the session. Raises RequestFailed.

    `write` shows pieces of an answer, `say` remarks of our own. A cancelled answer stays in the conversation.
    """
    line = line.strip()
    if not line:
        return True
    if line.startswith("/"):
        return _command(line, talk, say)
    talk.messages.append({"role": "user", "content": line})
    pieces: list[str] = []

    def on_text(piece: str) -> None:
        pieces.append(piece)
        write(piece)

    try:
        await answer(talk.as_request(), on_text)
    except RequestFailed:
        if not pieces:
            talk.messages.pop()  # unanswered: the person can simply send it again
        raise
    finally:
        if pieces:
            talk.messages.append({"role": "assistant", "content": "".join(pieces)})
            write("\n")
    return True


def _command(line: str, talk: Conversation, say: Callable[[str], None]) -> bool:
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        talk.reset()
        say("forgotten")
    elif name == "/system":
        talk.system = rest.strip()
        talk.reset()
        say("the model's instructions are set" if talk.system else "the model's own instructions are used")
    else:
        say(HELP)
    return True


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; empty: the first the server lists.")] = "",
    system: Annotated[str, typer.Option(help="Instructions for the model.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; the server's default if unset.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="For a server that wants one.")] = "",
) -> None:
    """Talk to the model. From a pipe, each line is a question and only the answers are printed."""
    target = Target("chat", url, model, api_key)
    try:
        status = _session(target, system, Settings(max_tokens, temperature, seed))
    except (RequestFailed, ValueError) as error:
        sys.exit(f"hortator chat: {url}: {described(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _session(target: Target, system: str, settings: Settings) -> int:
    name, _ = asyncio.run(served_model(target))
    person = sys.stdin.isatty()
    console = Console(markup=False, highlight=False, stderr=True)
    answer = HttpAnswerer(replace(target, model=name), settings)
    talk = Conversation(system)

    def say(text: str) -> None:
        if person:
            console.print(text, style="dim")

    def write(piece: str) -> None:
        # Not through rich: an answer's text must come out as it is, but it must not steer the terminal.
        sys.stdout.write(piece.translate(_CONTROL) if sys.stdout.isatty() else piece)
        sys.stdout.flush()

    say(f"{name} at {target.url}. {HELP}")
    status = 0
    while (line := _read_line(person)) is not None:
        try:
            # asyncio.run turns Ctrl-C into cancellation: the connection closes, so the server stops too.
            if not asyncio.run(answer_line(line, talk, answer, write, say)):
                break
        except RequestFailed as error:
            print(f"hortator chat: {described(error)}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            if not person:
                raise
            say("stopped")
    return status


def _read_line(person: bool) -> str | None:
    """The next line, None at the end of input. At the prompt, Ctrl-C ends the session."""
    if not person:
        return sys.stdin.readline() or None
    try:
        return input("› ")
    except EOFError:
        print()
        return None
