"""Parameter rules on InferenceService: they see its requests as bodies with OpenAI's names."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.body import parse_object
from gateway.generation import GenerationRequest, PriorityClass
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.param_rules import raise_if_rejected
from gateway.record import RequestRecord
from gateway.rules.condition_reader import ROUTES
from gateway.rules.engine import RuleRequest, actions_header, apply
from gateway.rules.headers import Header
from gateway.rules.model import RuleSet
from gateway.service_class import priority_class
from mesh.errors import InvalidRequest
from mesh.v1 import inference_pb2, tokenizer_pb2

# Fields of SamplingParams that are called the same in a body. What proto3 cannot tell from
# its zero counts as absent.
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
)

_TIERS = {PriorityClass.ONLINE: "default", PriorityClass.OFFLINE: "flex"}


@dataclass(frozen=True)
class RuledRequest:
    """A request after rules."""

    # None: no rule names one, and neither did the caller.
    model: str | None
    # What rules made of it; None when they changed nothing.
    payload: dict[str, Any] | None = None


def apply_rules(
    rules: RuleSet,
    request: inference_pb2.GenerateRequest,
    metadata: Sequence[Header],
    record: RequestRecord,
) -> RuledRequest:
    """Apply `rules`. What they did is noted in `record`. Raises RequestRejected for a rule."""
    if not rules.rules:
        return RuledRequest(request.model or None)
    sent = _to_payload(request)
    body = json.dumps(sent, ensure_ascii=False).encode("utf-8", "replace")
    outcome = apply(
        rules,
        RuleRequest(
            body,
            sent,
            ROUTES["inference"],
            metadata,
            key=record.caller.key,
            key_group=record.caller.group,
        ),
    )
    record.param_actions = actions_header(outcome.actions)
    raise_if_rejected(outcome)
    if outcome.body is body:
        return RuledRequest(request.model or None)
    payload = parse_object(outcome.body)
    model = payload.get("model")
    return RuledRequest(model if isinstance(model, str) else None, payload)


def read_payload(
    payload: dict[str, Any], request: inference_pb2.GenerateRequest, model: str
) -> GenerationRequest:
    """The request that the body says, where rules have changed it."""
    is_chat = request.HasField("chat")
    parsed: ChatRequest | CompletionRequest = (
        ChatRequest.parse({**payload, "model": model})
        if is_chat
        else CompletionRequest.parse({**payload, "model": model})
    )
    # Callers of this service say everything themselves: the model's defaults are for people.
    generation = parsed.generation(tokenizer_pb2.ModelInfo())
    if generation.n != 1 or len(generation.prompts) != 1:
        raise InvalidRequest("InferenceService generates one sequence a call", param="n")
    # What a body has no words for: bad words are token ids here, and a chat's prompt is described
    # without being echoed.
    sent = request.sampling_params
    generation.sampling_params.bad_words.extend(sent.bad_words)
    if sent.HasField("num_prompt_logprobs"):
        generation.sampling_params.num_prompt_logprobs = sent.num_prompt_logprobs
    return replace(generation, default_max_tokens=None, prompt_param=request.WhichOneof("input"))


def _to_payload(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    payload: dict[str, Any] = {"model": request.model} if request.model else {}
    payload |= _prompt(request)
    params = request.sampling_params
    present = {field.name for field, _ in params.ListFields()}
    for name in _SAMPLING:
        if name not in present:
            continue
        value = getattr(params, name)
        if name == "stop_token_ids":
            value = list(value)
        elif name == "logit_bias":
            value = {str(token_id): bias for token_id, bias in value.items()}
        payload[name] = value
    if "num_logprobs" in present:
        payload |= (
            {"logprobs": True, "top_logprobs": params.num_logprobs}
            if request.HasField("chat")
            else {"logprobs": params.num_logprobs}
        )
    if request.stop:
        payload["stop"] = list(request.stop)
    if request.include_stop_str_in_output:
        payload["include_stop_str_in_output"] = True
    if request.keep_special_tokens:
        payload["skip_special_tokens"] = False
    if request.cache_salt:
        payload["cache_salt"] = request.cache_salt
    if request.priority:
        payload["priority"] = request.priority
    if request.priority_class:
        payload["service_tier"] = _TIERS[priority_class(request.priority_class)]
    return payload


def _prompt(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    match request.WhichOneof("input"):
        case "text":
            return {"prompt": request.text}
        case "prompt_token_ids":
            return {"prompt": list(request.prompt_token_ids.token_ids)}
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("the input is empty", param="input")


def _chat(chat: tokenizer_pb2.Chat) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": _parse(chat.messages_json, "messages_json")}
    if chat.tools_json:
        fields["tools"] = _parse(chat.tools_json, "tools_json")
    if chat.template_kwargs_json:
        fields["chat_template_kwargs"] = _parse(chat.template_kwargs_json, "template_kwargs_json")
    if chat.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = chat.add_generation_prompt
    if chat.continue_final_message:
        fields["continue_final_message"] = True
    return fields


def _parse(text: str, name: str) -> Any:
    """As bodies are read: nothing that two parsers could read in two ways."""
    try:
        return parse_object(b'{"value":%b}' % text.encode("utf-8", "replace"))["value"]
    except InvalidRequest as error:
        raise InvalidRequest(f"{name} is not valid: {error}", param=name) from None
