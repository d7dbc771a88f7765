import asyncio
import json
import os
from collections.abc import Callable, Iterator

import psutil
import pytest

from tokenizer_svc.chat_template import ChatPrompt, InvalidTemplate, TemplateSpec
from tokenizer_svc.messages import ChatError
from tokenizer_svc.renderer import RenderLimits, TemplateRenderer

# The first message chooses what the template does.
DISPATCH = (
    "{% set c = messages[0].content %}"
    "{% if c == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif c == 'power' %}{{ ((7 + messages|length) ** (10 ** 8)) % 10 }}"
    "{% elif c == 'memory' %}{{ (c * 10**9) | length }}"
    "{% elif c == 'raise' %}{{ raise_exception('no') }}"
    "{% else %}{{ c }}{% endif %}"
)

Start = Callable[..., TemplateRenderer]


@pytest.fixture
def start() -> Iterator[Start]:
    renderers: list[TemplateRenderer] = []

    def start(source: str = DISPATCH, **limits: float) -> TemplateRenderer:
        spec = TemplateSpec({"default": source}, {}, {"<s>": "[S]"}, max_prompt_chars=1 << 20)
        values = {"num_processes": 1, "timeout_s": 60, "memory_bytes": 1 << 28} | limits
        renderers.append(TemplateRenderer(spec, RenderLimits(**values)))  # type: ignore[arg-type]
        return renderers[-1]

    yield start
    for renderer in renderers:
        renderer.close()


def children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children())


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(json.dumps([{"role": "user", "content": content}]))


async def refusal(renderer: TemplateRenderer, content: str) -> str:
    with pytest.raises(ChatError) as caught:
        await renderer.render(chat(content))
    assert caught.value.param == "messages"
    return str(caught.value)


async def test_a_chat_is_rendered_in_another_process(start: Start) -> None:
    renderer = start()

    assert await renderer.render(chat("é <s>")) == "é <s>".encode()


async def test_large_chats_pass_through_the_pipes(start: Start) -> None:
    text = "0123456789" * 100_000

    assert await start().render(chat(text)) == text.encode()


# TK-11
async def test_a_refusal_keeps_its_message(start: Start) -> None:
    renderer = start()

    assert "no" in await refusal(renderer, "raise")
    assert await renderer.render(chat("next")) == b"next"


# TK-12
@pytest.mark.parametrize("content", ["loop", "power"])
async def test_a_template_that_does_not_end_is_ended(start: Start, content: str) -> None:
    renderer = start(timeout_s=0.5)

    assert "took longer than 0.5 s" in await refusal(renderer, content)
    assert await renderer.render(chat("next")) == b"next"


# TK-12
async def test_a_template_that_takes_all_memory_gets_none(start: Start) -> None:
    renderer = start()

    assert "takes too much" in await refusal(renderer, "memory")
    assert await renderer.render(chat("next")) == b"next"


# TK-12
async def test_others_are_served_while_a_template_does_not_end(start: Start) -> None:
    other_model = start()
    before = children()
    renderer = start(num_processes=2)
    stuck = asyncio.create_task(refusal(renderer, "loop"))

    for i in range(50):
        assert await renderer.render(chat(f"same model {i}")) == f"same model {i}".encode()
        assert await other_model.render(chat("other")) == b"other"

    assert not stuck.done()
    for child in children() - before:
        child.kill()
    assert "ended its process" in await stuck


async def test_cancelling_leaves_the_process_usable(start: Start) -> None:
    renderer = start()
    renders = [asyncio.create_task(renderer.render(chat(f"{i}"))) for i in range(20)]
    await asyncio.wait(renders, return_when=asyncio.FIRST_COMPLETED)

    for render in renders:
        render.cancel()

    # Answers that nobody waits for must not be taken for later ones.
    assert await renderer.render(chat("after")) == b"after"


async def test_a_process_that_is_killed_between_chats_costs_none_of_them(start: Start) -> None:
    before = children()
    renderer = start()
    (child,) = children() - before
    child.kill()
    child.wait(20)

    assert await renderer.render(chat("y")) == b"y"


# TK-12
def test_a_template_that_takes_too_long_already_to_compile_is_refused(start: Start) -> None:
    with pytest.raises(InvalidTemplate, match=r"took longer than 0\.5 s"):
        start("{{ (7 ** (10 ** 8)) % 10 }}", timeout_s=0.5)


def test_a_template_that_does_not_compile_leaves_no_process(start: Start) -> None:
    before = children()

    with pytest.raises(InvalidTemplate, match="line 1"):
        start("{% if %}", num_processes=2)

    assert children() == before


def test_closing_ends_the_processes(start: Start) -> None:
    before = children()
    renderer = start(num_processes=2)
    assert len(children() - before) == 2

    renderer.close()

    assert children() == before
