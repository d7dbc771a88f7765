"""A model's chat template: messages in, the prompt's text out."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Never

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import orjson
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer_svc.control_tokens import ControlTokens, unmark
from tokenizer_svc.messages import (
    ChatError,
    Message,
    parse_messages,
    parse_template_kwargs,
    parse_tools,
)

# Like the marks of control tokens: cannot occur in a request. The space shows
# whether the template trims the ends of a message.
_END_OF_FINAL_MESSAGE = "\ud801"
_PADDED_END = _END_OF_FINAL_MESSAGE + " "

# What transformers leaves undefined where a model lacks it, and prints as nothing.
_OPTIONAL_VARIABLES = frozenset(
    {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}
)


class InvalidTemplate(Exception):
    """The model's template cannot be compiled."""


@dataclass(frozen=True)
class TemplateSpec:
    """Everything that a template needs besides a request."""

    # By name: "default", and "tool_use" for requests with tools where there is one.
    sources: Mapping[str, str]
    # bos_token, eos_token, …
    special_tokens: Mapping[str, str]
    # Control token -> secret spelling.
    sealed: Mapping[str, str]
    max_prompt_chars: int

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> "TemplateSpec":
        return cls(**orjson.loads(data))


@dataclass(frozen=True)
class ChatPrompt:
    """One chat to render, its parts as the JSON that the client sent."""

    messages_json: str
    tools_json: str = ""
    template_kwargs_json: str = ""
    # None: unless the final message is continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class ChatTemplate:
    """Renders chats in a sandbox; bounding its time and memory is up to the caller."""

    def __init__(self, spec: TemplateSpec, now: Callable[[], datetime] = datetime.now) -> None:
        self._control_tokens = ControlTokens(spec.sealed)
        self._special_tokens = dict(spec.special_tokens)
        self._max_prompt_chars = spec.max_prompt_chars
        self._sources = dict(spec.sources)
        environment = _environment(self._control_tokens, now)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in self._sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise InvalidTemplate(f"line {error.lineno}: {error.message}") from error
        except (MemoryError, RecursionError, OverflowError) as error:
            raise InvalidTemplate(f"takes too much: {type(error).__name__}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text, its control tokens in their secret spelling.

        Raises:
            ChatError: the chat is malformed, or the template refuses it.
        """
        try:
            return self._render(prompt)
        except (MemoryError, RecursionError) as error:
            raise _refused(f"the messages take too much: {type(error).__name__}") from error

    def _render(self, prompt: ChatPrompt) -> str:
        messages = parse_messages(prompt.messages_json)
        tools = parse_tools(prompt.tools_json)
        kwargs = parse_template_kwargs(prompt.template_kwargs_json)
        add_generation_prompt = prompt.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not prompt.continue_final_message
        elif add_generation_prompt and prompt.continue_final_message:
            raise ChatError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables = {
            "documents": None,
            **self._special_tokens,
            **self._control_tokens.mark(kwargs),
            "messages": self._for_template(messages, name, prompt.continue_final_message),
            "tools": self._control_tokens.mark(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._templates[name], variables)
        if prompt.continue_final_message:
            text = _cut_after_final_message(text)
        return self._control_tokens.seal(text)

    def _for_template(
        self, messages: list[Message], name: str, continue_final_message: bool
    ) -> list[Message]:
        marked: list[Message] = self._control_tokens.mark(messages)
        for message in marked:
            # Newer than most templates, and a system message in all but name.
            if message["role"] == "developer" and "developer" not in self._sources[name]:
                message["role"] = "system"
        if continue_final_message:
            marked[-1]["content"] += _PADDED_END
        return marked

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        chunks: list[str] = []
        num_chars = 0
        try:
            for chunk in template.generate(variables):
                chunks.append(chunk)
                num_chars += len(chunk)
                if num_chars > self._max_prompt_chars:
                    raise ChatError(
                        f"the chat template wrote more than {self._max_prompt_chars} characters",
                        "messages",
                    )
            return "".join(chunks)
        except ChatError:
            raise
        except jinja2.UndefinedError as error:
            raise _refused(f"the chat template needs what is not there: {error.message}") from error
        except SecurityError as error:
            raise _refused(f"the chat template does what it must not: {error}") from error
        except jinja2.TemplateError as error:
            raise _refused(f"the chat template refuses these messages: {error.message}") from error
        except (MemoryError, RecursionError, OverflowError) as error:
            raise _refused(f"the chat template takes too much: {type(error).__name__}") from error
        except Exception as error:  # whatever an expression of the template can raise
            raise _refused(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error


def _refused(reason: str) -> ChatError:
    return ChatError(unmark(reason), "messages")


def _cut_after_final_message(text: str) -> str:
    end = text.rfind(_END_OF_FINAL_MESSAGE)
    if end < 0:
        raise ChatError(
            "the chat template does not print the end of the final message, so it cannot be"
            " continued",
            "continue_final_message",
        )
    if text.startswith(_PADDED_END, end):
        return text[:end]
    return text[:end].rstrip()


def _environment(
    control_tokens: ControlTokens, now: Callable[[], datetime]
) -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders templates, except for `_Undefined`."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Marks must not be escaped, so they are taken out and put back.
        text = json.dumps(
            unmark(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_no_json,
        )
        return control_tokens.mark_text(text)

    def finalize(value: Any) -> Any:
        # Printing a collection would escape the marks in its strings.
        if isinstance(value, dict | list | tuple):
            return control_tokens.mark_text(str(unmark(value)))
        return value

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        undefined=_Undefined,
        finalize=finalize,
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Undefined(jinja2.Undefined):
    """Can be tested for, but is an error where it would be printed."""

    __slots__ = ()

    def __str__(self) -> str:
        is_variable = self._undefined_obj is jinja2.utils.missing
        if not (is_variable and self._undefined_name in _OPTIONAL_VARIABLES):
            self._fail_with_undefined_error()
        return ""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}` marks an answer for training; rendered as is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(…)` for templates, without the methods through which one could break out."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` for templates, without attributes that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` stays free as an attribute's name, as in Jinja's own class.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _no_json(value: Any) -> Never:
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, and says what is undefined
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
