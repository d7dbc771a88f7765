"""Tokens that are bytes become text in the gateway, without the tokenizer's help."""

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.generation import Chunk, Deadline, Finish, GenerationRequest, Job, TextPrompt
from gateway.local_text import LocalText
from gateway.tokenizer import ModelCatalog, Tokenizer
from mesh.client import connect
from mesh.errors import InternalError, WorkerUnavailable
from mesh.text.token_bytes import TokenBytes
from mesh.v1 import types_pb2
from tests.gateway.fake_tokenizer import EOS, MODEL, VOCAB_SIZE, token_bytes
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, run_gateway, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"
TOKENS = TokenBytes([token_bytes(i) for i in range(VOCAB_SIZE)], frozenset({EOS}))
STOP = Finish(types_pb2.FINISH_REASON_STOP, stop_token_id=EOS)
LENGTH = Finish(types_pb2.FINISH_REASON_LENGTH)


def job(prompt: Sequence[int] = (1,), **options: object) -> Job:
    params = types_pb2.SamplingParams(max_tokens=100)
    request = GenerationRequest(prompts=(TextPrompt("x"),), sampling_params=params, **options)  # type: ignore[arg-type]
    return Job(
        request_id="r",
        model=MODEL,
        prompt_token_ids=prompt,
        sampling_params=params,
        end_token_ids=frozenset({EOS}),
        request=request,
        deadline=Deadline(60),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local_http(shared_mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that knows the bytes of the tokens."""
    shared_mesh.tokenizer.has_byte_tokens = True
    async with (
        run_gateway(shared_mesh) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
    ):
        yield client
    shared_mesh.tokenizer.has_byte_tokens = False


async def test_answers_are_the_same_and_the_tokenizer_is_not_asked(
    local_http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    num_answers = mesh.tokenizer.num_answers

    payloads = await events(local_http, CHAT, chat(stream=True))
    stopped = await events(local_http, CHAT, chat(stream=True, stop=["wor"]))

    assert text_of(payloads) == HELLO
    assert text_of(stopped) == "Hello, "
    assert stopped[-2]["choices"][0]["finish_reason"] == "stop"
    assert mesh.tokenizer.num_answers == num_answers


async def test_stop_string_stops_the_worker(local_http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # TK-17
    mesh.model.default = [*b"one two three", EOS]

    whole = (await local_http.post(CHAT, json=chat(stop=["two"], max_tokens=50))).json()

    assert whole["choices"][0]["message"]["content"] == "one "
    assert whole["usage"]["completion_tokens"] == len("one two")
    await eventually(lambda: not mesh.decode.num_active and not mesh.prefill.held)


async def test_a_stream_outlives_the_tokenizer() -> None:
    async with FakeMesh() as mesh:
        mesh.tokenizer.has_byte_tokens = True
        async with (
            run_gateway(mesh) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
            http.stream("POST", CHAT, json=chat(stream=True)) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            await mesh.kill("tokenizer")
            rest = [line async for line in lines]

        assert rest[-2:] == ["data: [DONE]", ""]
        assert "error" not in "".join(rest)


async def test_text_has_a_span_in_its_trace(
    local_http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    await local_http.post(CHAT, json=chat(stop=["wor"]))

    found = {span.name: span for span in spans.get_finished_spans()}
    text, root = found["tokenizer.detokenize"], found["gateway.request"]
    assert text.parent is not None
    assert root.context is not None
    assert text.parent.span_id == root.context.span_id
    assert text.attributes is not None
    assert text.attributes["pdmesh.matched_stop"] is True
    assert text.attributes["pdmesh.num_tokens"] == len("Hello, wor")
    # From its first token on.
    placed = found["gateway.attempt"]
    assert placed.start_time is not None
    assert text.start_time is not None
    assert text.start_time > placed.start_time


async def test_tokens_are_learned_anew_when_they_change() -> None:
    async with FakeMesh() as mesh, connect(mesh.tokenizer_address) as channel:
        catalog = ModelCatalog(Tokenizer(channel, encode_timeout_s=5, patience_s=5))
        fake = mesh.tokenizer
        await catalog.refresh()
        assert catalog.token_bytes == {}

        fake.has_byte_tokens, fake.token_bytes_error = True, WorkerUnavailable("not now")
        await catalog.refresh(timeout_s=1)
        assert catalog.token_bytes == {}

        fake.token_bytes_error = None
        await catalog.refresh()
        first = catalog.token_bytes[MODEL]
        assert first == TOKENS

        await catalog.refresh()
        assert catalog.token_bytes[MODEL] is first
        fake.tokenizer_sha256 = "2"
        await catalog.refresh()
        assert catalog.token_bytes[MODEL] is not first

        fake.model, fake.has_byte_tokens = "another", False
        await catalog.refresh()
        assert catalog.token_bytes == {}


async def test_split_character_and_tokens_behind_a_stop_string() -> None:
    async with LocalText(job(stop=("stop",)), TOKENS) as text:
        parts = [(await text.append(Chunk(list("a👩".encode())[:3]))).text]
        parts.append((await text.append(Chunk(list("👩".encode())[2:]))).text)
        parts.append((await text.append(Chunk(list(b" st")))).text)
        last = await text.append(Chunk(list(b"opped")))

    assert [*parts, last.text] == ["a", "👩", " ", ""]
    assert last.finish is not None
    assert last.finish.stop_string == "stop"
    assert bytes(last.token_ids) == b"op"
    assert text.job.num_completion_tokens == len("a👩 stop".encode())


async def test_character_that_the_prompt_began_is_the_prompts() -> None:
    begun = list("é".encode())
    async with LocalText(job(prompt=begun[:1]), TOKENS) as text:
        assert (await text.append(Chunk(begun[1:]))).text == "é"
    async with LocalText(job(prompt=begun[:1]), TOKENS) as text:
        assert (await text.append(Chunk([65]))).text == "A"


@pytest.mark.parametrize("is_skipped", [True, False])
async def test_control_tokens(is_skipped: bool) -> None:
    async with LocalText(job(skip_special_tokens=is_skipped), TOKENS) as text:
        inside = await text.append(Chunk([65, EOS, 66]))
        # The one that ends the sequence has no text in any case.
        last = await text.append(Chunk([EOS], finish=STOP))

    assert inside.text == ("AB" if is_skipped else "A<eos>B")
    assert last.text == ""
    assert list(last.token_ids) == [EOS]


async def test_unfinished_character_at_the_end() -> None:
    async with LocalText(job(), TOKENS) as text:
        assert (await text.append(Chunk([0xC3]))).text == ""
        assert (await text.append(Chunk([], finish=LENGTH))).text == "\ufffd"


async def test_described_tokens_have_their_bytes() -> None:
    logprobs = types_pb2.TokenLogprobs(
        token_id=65, top=[types_pb2.TokenLogprobs.Candidate(token_id=EOS)]
    )
    async with LocalText(job(), TOKENS) as text:
        delta = await text.append(Chunk([65], logprobs=[logprobs]))

    assert delta.token_bytes == {65: b"A", EOS: b"<eos>"}


async def test_token_outside_the_vocabulary_is_our_fault() -> None:
    async with LocalText(job(), TOKENS) as text:
        with pytest.raises(InternalError, match="outside the vocabulary"):
            await text.append(Chunk([VOCAB_SIZE]))


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_text_does_not_depend_on_how_tokens_come(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    text = LocalText(job(), TOKENS)
    parts: list[str] = []
    for start, end in pairwise(bounds):
        parts.append(_text(text, Chunk(list(data[start:end]))))
    parts.append(_text(text, Chunk([], finish=LENGTH)))

    assert "".join(parts) == data.decode("utf-8", "replace")


def _text(text: LocalText, chunk: Chunk) -> str:
    appending = text.append(chunk)
    try:
        appending.send(None)
    except StopIteration as end:
        return str(end.value.text)
    raise AssertionError("nothing to wait for")
