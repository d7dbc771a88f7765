"""OpenTelemetry's GenAI attributes of what was asked and, where an operator wants it, said."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.generation import ChatPrompt, Job, Prompt, TextPrompt

Attribute = str | int | float | bool | list[str]

# SamplingParams' names after "gen_ai.request.".
_PARAMS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


def request_attributes(jobs: Sequence[Job]) -> dict[str, Attribute]:
    """The parameters that the request ran with: the seed too, if it was drawn here."""
    params, request = jobs[0].sampling_params, jobs[0].request
    attributes: dict[str, Attribute] = {
        f"gen_ai.request.{name}": getattr(params, name)
        for name in _PARAMS
        if params.HasField(name)  # type: ignore[arg-type]
    }
    attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.stop:
        attributes["gen_ai.request.stop_sequences"] = list(request.stop)
    return attributes


class Content:
    """The text of one request, in the form that tracing UIs show as a conversation."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}

    def add(self, index: int, text: str) -> None:
        """Text of a choice has come."""
        self._texts.setdefault(index, []).append(text)

    def attributes(
        self, jobs: Sequence[Job], finish_reasons: Mapping[int, str]
    ) -> dict[str, Attribute]:
        """What was asked, and what was answered as far as it came."""
        prompts = jobs[0].request.prompts
        answered = [
            {
                "role": "assistant",
                "parts": [_text_part("".join(self._texts[index]))],
                "finish_reason": finish_reasons.get(index, "error"),
            }
            for index in sorted(self._texts)
        ]
        return {
            "gen_ai.input.messages": _json(one for prompt in prompts for one in _asked(prompt)),
            "gen_ai.output.messages": _json(answered),
        }


def _asked(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, TextPrompt):
        return [{"role": "user", "parts": [_text_part(prompt.text)]}]
    if isinstance(prompt, ChatPrompt):
        messages: list[dict[str, Any]] = json.loads(prompt.chat.messages_json)
        return [
            {"role": one.get("role", ""), "parts": _parts(one.get("content"))} for one in messages
        ]
    part = {"type": "token_ids", "token_ids": list(prompt.token_ids)}
    return [{"role": "user", "parts": [part]}]


def _parts(content: object) -> list[dict[str, str]]:
    """OpenAI's content, text or parts of text, in OpenTelemetry's words."""
    if isinstance(content, str):
        return [_text_part(content)]
    return [_text_part(part["text"]) for part in content] if isinstance(content, list) else []


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "content": text}


def _json(messages: Iterable[dict[str, Any]]) -> str:
    return json.dumps(list(messages), ensure_ascii=False)
