"""One request from plan to last byte: opened in the mesh, gathered, ended in any way it can end."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.choice import Choice, CollectingWriter, FastChoice, StreamWriter, TextChoice
from services.gateway.errors import ApiError
from services.gateway.formats import (
    DONE,
    ChatFormat,
    CompletionFormat,
    Entry,
    Envelope,
    Finished,
    Format,
    Usage,
    error_event,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.outlet import PING, Outlet
from services.gateway.plan import Plan, Prompt
from services.gateway.tokenizer import ModelCard
from shared.client import MeshClient, Open, OpenRequest, OpenSeq
from shared.wire import Answer, EndRow, Sampling, SeqTimes

_JSON = [(b"content-type", b"application/json")]
SHORTEST_DEFAULT = 16
"""An output whose length the client left open is not shortened below this."""
_SUMMED = tuple(SeqTimes.__struct_fields__)


class Generation:
    """After `begin` the mesh client drives it until the outlet has finished, or until `abandon`."""

    def __init__(
        self,
        plan: Plan,
        outlet: Outlet,
        card: ModelCard,
        client: MeshClient,
        metrics: GatewayMetrics,
        *,
        received_at: float,
        timeouts: tuple[float, float],
        with_timing: bool,
        on_error: Callable[[ApiError], None],
    ) -> None:
        """`timeouts`: seconds for the request and for its time in the queue; `received_at`: loop time."""
        self._on_error = on_error
        self._plan = plan
        self._outlet = outlet
        self._card = card
        self._client = client
        self._metrics = metrics
        self._received_at = received_at
        self._timeouts = timeouts
        self._with_timing = with_timing
        self.id = ("chatcmpl-" if plan.chat else "cmpl-") + secrets.token_hex(12)
        envelope = Envelope(
            id=self.id,
            created=int(time.time()),
            model=card.name,
            card=card,
            usage_wanted=plan.stream.usage,
            token_ids=plan.text.token_ids,
            logprobs=plan.text.logprobs is not None,
        )
        self._format: Format = ChatFormat(envelope) if plan.chat else CompletionFormat(envelope)
        self._writers: list[CollectingWriter] = []
        self._choices: list[Choice] = [
            self._choice(number * plan.n + choice, prompt)
            for number, prompt in enumerate(plan.prompts)
            for choice in range(plan.n)
        ]
        self._left = len(self._choices)
        self._mesh_ids = [f"{self.id}-{number}" for number in range(len(plan.prompts))]
        """Of each prompt's request in the mesh."""
        self._cached = [0] * len(plan.prompts)
        self._prompt_tokens = sum(len(prompt.ids) for prompt in plan.prompts)
        self.over = False
        """The response is complete, failed or abandoned."""
        outlet.on_overflow(self.abandon)

    def begin(self) -> None:
        plan = self._plan
        self._metrics.began(self._prompt_tokens)
        for number, prompt in enumerate(plan.prompts):
            self._open(number, prompt.sampling)

    def _open(self, number: int, sampling: Sampling) -> None:
        plan = self._plan
        timeout_s, queue_timeout_s = self._timeouts
        self._client.open(
            Open(
                request_id=self._mesh_ids[number],
                prompt=plan.prompts[number].ids,
                sampling=sampling,
                sinks=self._choices[number * plan.n : (number + 1) * plan.n],
                priority=plan.priority,
                timeout_s=timeout_s,
                queue_timeout_s=queue_timeout_s,
                salt=plan.salt,
            )
        )

    def abandon(self) -> None:
        """The client is gone: nothing more is wanted."""
        if not self.over:
            self._end("abandoned")
            self._outlet.close()
            self._cancel_all()

    def fail(self, error: ApiError) -> None:
        """End everything with an error: as a status if nothing was sent yet, else as a last event."""
        if self.over:
            return
        self._end("error")
        self._on_error(error)
        self._cancel_all()
        if self._outlet.started or self._outlet.parts:
            self._outlet.parts.append(error_event(error.body()))
            self._outlet.finish()
        else:
            self._outlet.refuse(error)

    @property
    def has_tokens(self) -> bool:
        return any(choice.first_at for choice in self._choices)

    def ping_if_idle(self, now: float, after_s: float) -> None:
        """A comment, if the stream said nothing for so long; it begins the stream if need be."""
        outlet = self._outlet
        if not self._plan.stream.stream or self.over or outlet.marked:
            return
        if now - max(outlet.written_at, self._received_at) >= after_s:
            outlet.parts.append(PING)
            outlet.mark()

    # What the choices tell

    def first_token(self, choice: Choice) -> None:
        now = self._client.progress_at
        choice.first_at = now
        self._metrics.first_token(now - self._received_at)

    def usage_now(self) -> Usage:
        completion = sum(choice.count for choice in self._choices)
        return Usage(self._prompt_tokens, completion, sum(self._cached))

    def stopped_here(self, choice: Choice, seq: OpenSeq) -> None:
        # Its end follows at once, and brings what usage and timing have to say.
        number, position = divmod(choice.index, self._plan.n)
        self._client.cancel(self._mesh_ids[number], (position,))

    def choice_ended(self, choice: Choice, seq: OpenSeq, end: EndRow) -> None:
        if self.over:
            return
        number = choice.index // self._plan.n
        self._cached[number] = max(self._cached[number], end.cached_tokens)
        if choice.done:  # by a stop string, which the scheduler knows as a cancel
            finished = Finished(choice.index, "stop")
        elif end.reason in ("stop", "length"):
            choice.done = True
            finished = Finished(choice.index, end.reason)
            if end.reason == "stop" and seq.accepted and seq.accepted[-1] not in self._card.eos_ids:
                finished.stop_reason = seq.accepted[-1]
        else:
            self.fail(_ended_badly(end))
            return
        self._metrics.times(end.times)
        if self._with_timing:
            finished.timing = self._ledger(end.times)
        self._finish(choice, seq, finished)

    def refused(self, request: OpenRequest, answer: Answer) -> None:
        shorter = request.spec.sampling.max_tokens // 2
        if (
            answer.code == "too_long"
            and self._plan.open_ended
            and shorter >= SHORTEST_DEFAULT
            and not self.over
        ):
            number = self._mesh_ids.index(request.id)
            self._mesh_ids[number] = f"{self.id}-{number}-{shorter}"
            self._open(number, msgspec.structs.replace(request.spec.sampling, max_tokens=shorter))
            return
        self.fail(_refusal(answer))

    def _finish(self, choice: Choice, seq: OpenSeq, end: Finished) -> None:
        if self._plan.text.token_ids:
            end.token_ids = seq.accepted[: choice.count]
        choice.last_at = self._client.progress_at
        choice.finish(end)
        self._metrics.choice_ended(choice.count, choice.last_at - choice.first_at, end.reason)
        self._left -= 1
        if self._left == 0 and not self.over:
            self._complete()

    def _complete(self) -> None:
        self._end("ok")
        outlet = self._outlet
        if not self._plan.stream.stream:
            ends = [writer.finished for writer in self._writers if writer.finished is not None]
            outlet.respond(200, _JSON, self._format.whole(ends, self.usage_now()))
            return
        if self._plan.stream.usage:
            outlet.parts.append(self._format.usage(self.usage_now()))
        outlet.parts.append(DONE)
        outlet.finish()

    def _end(self, outcome: str) -> None:
        self.over = True
        self._metrics.ended(outcome, self._client.now() - self._received_at)

    def _cancel_all(self) -> None:
        for mesh_id in self._mesh_ids:
            self._client.cancel(mesh_id)

    # Making choices

    def _choice(self, index: int, prompt: Prompt) -> Choice:
        plan, outlet = self._plan, self._outlet
        if plan.is_fast and self._card.byte_level:
            return FastChoice(index, self, outlet, self._card, self._format)
        if plan.stream.stream:
            usage: Callable[[], Usage] | None = self.usage_now if plan.stream.continuous_usage else None
            stream = StreamWriter(self._format, outlet, usage)
            choice = TextChoice(index, self, outlet, self._card, plan.text, stream)
            opening = self._format.opening(index, prompt.ids if plan.text.token_ids else None)
            choice.begins_with(lambda: outlet.parts.append(opening) if opening else None)
        else:
            collected = CollectingWriter(plan.text.token_ids, prompt.ids)
            self._writers.append(collected)
            choice = TextChoice(index, self, outlet, self._card, plan.text, collected)
        if prompt.echo is not None:
            choice.opens_with(lambda seq: self._echo(prompt, seq))
        return choice

    def _echo(self, prompt: Prompt, seq: OpenSeq) -> tuple[str, list[Entry]]:
        text = prompt.echo or ""
        wanted = self._plan.text.logprobs
        if self._plan.chat or (wanted is None and not self._plan.text.token_ids):
            return text, []
        known = seq.request.prompt_logprobs
        detok = self._card.detokenizer(self._plan.text.skip_special)
        entries, offset = [], 0
        for position, token in enumerate(prompt.ids):
            chosen, top = known.get(position, (None, []))
            entries.append(Entry(token, chosen, top[: wanted or 0], offset))
            offset += len(detok.push(token))
        return text, entries

    def _ledger(self, times: SeqTimes) -> dict[str, float]:
        """Seconds by cause; they sum to `total_s`. `gateway_s` is what no other part accounts for."""
        total = self._client.now() - self._received_at
        parts: dict[str, Any] = {name: round(getattr(times, name), 6) for name in _SUMMED}
        parts["gateway_s"] = round(total - sum(parts.values()), 6)
        parts["total_s"] = round(total, 6)
        return parts


def _refusal(answer: Answer) -> ApiError:
    retry = answer.retry_after_s
    if answer.code == "queue_full":
        text = answer.message or "The queue is full. Try again later."
        return ApiError(429, text, code="queue_full", retry_after_s=retry or 1.0)
    if answer.code in ("no_instance", "draining"):
        text = answer.message or "No instance can serve this model now."
        return ApiError(503, text, code=answer.code, retry_after_s=retry or 2.0)
    if answer.code == "too_long":
        return ApiError(400, answer.message or "The request is too long.", code="context_length_exceeded")
    if answer.code == "invalid":
        return ApiError(400, answer.message or "The scheduler refuses this request.", code="invalid_value")
    return ApiError(500, answer.message or "The request could not be served.", code="internal_error")


def _ended_badly(end: EndRow) -> ApiError:
    reason, message = end.reason, end.message
    if reason == "timeout":
        # Without a token it only ever waited: the mesh is full, not slow.
        status = 504 if end.generated else 503
        return ApiError(status, message or "The request took too long.", code="timeout", retry_after_s=2.0)
    if reason == "cancelled":
        text = message or "The request was cancelled by the scheduler."
        return ApiError(503, text, code="cancelled", retry_after_s=1.0)
    return ApiError(500, message or "Generation failed.", code="generation_failed")
