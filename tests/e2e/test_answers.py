"""The default model, through the official client and a real mesh."""

import asyncio
from typing import Any

import openai
import pytest

from quality.prompts import SIX_QUESTIONS
from tests.e2e.harness import MODEL


def ask(client: openai.OpenAI, kind: str, prompt: str, stream: bool) -> str:
    if kind == "completion":
        made = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=stream
        )
        if isinstance(made, openai.Stream):
            return "".join(chunk.choices[0].text for chunk in made if chunk.choices)
        return made.choices[0].text
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0,
        stream=stream,
    )
    if isinstance(answer, openai.Stream):
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize(("kind", "prompt", "expected"), SIX_QUESTIONS)
def test_the_six_questions_are_answered_right_and_alike_in_both_forms(
    client: openai.OpenAI, kind: str, prompt: str, expected: str
) -> None:
    whole = ask(client, kind, prompt, stream=False)
    streamed = ask(client, kind, prompt, stream=True)

    assert expected in whole
    assert streamed == whole


async def test_seeded_sampling_gives_the_same_text_alone_and_among_sixteen(
    async_client: openai.AsyncOpenAI,
) -> None:
    async def sample(seed: int, prompt: str) -> str:
        answer = await async_client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=32,
            temperature=0.9,
            top_p=0.95,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    alone = await sample(42, "My favourite season is")
    neighbours = [sample(seed, f"Neighbour {seed} says that") for seed in range(15)]
    among, *_ = await asyncio.gather(sample(42, "My favourite season is"), *neighbours)

    assert among == alone
    assert len(alone) > 20


def test_greedy_choices_are_equal_and_drawn_ones_are_the_same_again(client: openai.OpenAI) -> None:
    # GW-07, GW-22
    def texts(**more: Any) -> list[str]:
        made = client.completions.create(
            model=MODEL, prompt="My favourite season is", max_tokens=12, **more
        )
        return [choice.text for choice in made.choices]

    greedy = texts(n=2, temperature=0)
    drawn = texts(n=3, temperature=0.8, seed=0)

    assert greedy[0] == greedy[1]
    assert texts(n=3, temperature=0.8, seed=0) == drawn
    assert len(set(drawn)) == 3


def test_an_echo_scores_tokens_as_their_production_did(client: openai.OpenAI) -> None:
    prompt_ids = list(range(1000, 1100))
    made = client.completions.create(
        model=MODEL, prompt=prompt_ids, max_tokens=24, temperature=0, logprobs=3
    ).choices[0]
    assert made.logprobs is not None

    echoed = client.completions.create(
        model=MODEL,
        prompt=prompt_ids,
        max_tokens=1,
        temperature=0,
        logprobs=3,
        echo=True,
        # The same prompt with what came of it, a part of which is in the prefix cache.
        extra_body={"prompt": prompt_ids + tokenize(client, made.text)},
    ).choices[0]

    assert echoed.logprobs is not None
    assert echoed.logprobs.tokens is not None
    assert made.text in echoed.text
    first, last = len(prompt_ids), len(prompt_ids) + 23
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        produced = getattr(made.logprobs, name)
        assert getattr(echoed.logprobs, name)[first:last] == produced[:23]
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[0] is None


def tokenize(client: openai.OpenAI, text: str) -> list[int]:
    response = client.post(
        f"{str(client.base_url).removesuffix('/v1/')}/tokenize",
        cast_to=dict[str, Any],
        body={"model": MODEL, "prompt": text},
    )
    token_ids: list[int] = response["tokens"]
    return token_ids
