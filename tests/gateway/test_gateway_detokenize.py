"""The one Detokenize call of a gateway: shared, and made again when it breaks."""

import asyncio

import httpx
import pytest

from gateway.detokenize import Detokenizer
from gateway.generation import Chunk, Deadline, GenerationRequest, Job, TextPrompt
from mesh.client import connect
from mesh.errors import DeadlineExceeded
from mesh.v1 import types_pb2
from tests.gateway.fake_tokenizer import EOS, MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, run_gateway, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"


def job(stop: tuple[str, ...] = ()) -> Job:
    params = types_pb2.SamplingParams(max_tokens=100)
    return Job(
        request_id="r",
        model=MODEL,
        prompt_token_ids=[1],
        sampling_params=params,
        end_token_ids=frozenset({EOS}),
        request=GenerationRequest(prompts=(TextPrompt("x"),), sampling_params=params, stop=stop),
        deadline=Deadline(60),
    )


@pytest.mark.parametrize("break_after", range(0, 15, 2))
async def test_text_survives_a_broken_call_without_loss_or_repetition(
    http: httpx.AsyncClient, mesh: FakeMesh, break_after: int
) -> None:
    calls = mesh.tokenizer.num_calls
    mesh.tokenizer.break_after = mesh.tokenizer.num_answers + break_after

    payloads = await events(http, CHAT, chat(stream=True))

    assert text_of(payloads) == HELLO
    if break_after < len(HELLO):
        await eventually(lambda: mesh.tokenizer.num_calls > calls)


async def test_split_character_and_held_back_text_survive_a_broken_call(mesh: FakeMesh) -> None:
    async with (
        connect(mesh.tokenizer_address) as channel,
        Detokenizer(channel) as detokenizer,
        detokenizer.open(job(stop=("stop",))) as text,
    ):
        parts = [(await text.append(Chunk(list("a👩".encode())[:3]))).text]
        mesh.tokenizer.break_after = 0
        parts.append((await text.append(Chunk(list("👩".encode())[2:]))).text)
        parts.append((await text.append(Chunk(list(b" st")))).text)
        mesh.tokenizer.break_after = 0
        last = await text.append(Chunk(list(b"opped")))

    assert [*parts, last.text] == ["a", "👩", " ", ""]
    assert last.finish is not None
    assert last.finish.stop_string == "stop"
    # "op" completed the match; what came behind it never existed.
    assert bytes(last.token_ids) == b"op"


async def test_sequences_share_one_call(mesh: FakeMesh) -> None:
    calls = mesh.tokenizer.num_calls
    async with connect(mesh.tokenizer_address) as channel, Detokenizer(channel) as detokenizer:

        async def spell(word: str) -> str:
            async with detokenizer.open(job()) as text:
                parts = [(await text.append(Chunk([byte]))).text for byte in word.encode()]
            return "".join(parts)

        words = await asyncio.gather(*(spell(f"word {i}") for i in range(20)))

    assert words == [f"word {i}" for i in range(20)]
    assert mesh.tokenizer.num_calls == calls + 1
    # What comes up together travels together.
    assert mesh.tokenizer.num_messages < mesh.tokenizer.num_answers


async def test_left_sequence_is_closed(mesh: FakeMesh) -> None:
    async with connect(mesh.tokenizer_address) as channel, Detokenizer(channel) as detokenizer:
        # Those of earlier tests may be closing still.
        await eventually(lambda: mesh.tokenizer.num_open == 0)
        async with detokenizer.open(job()) as text:
            await text.append(Chunk([65]))
            assert mesh.tokenizer.num_open == 1
        await eventually(lambda: mesh.tokenizer.num_open == 0)


async def test_tokenizer_that_restarts_is_found_again() -> None:
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            mesh.decode.steps = asyncio.Semaphore(3)
            asking = asyncio.create_task(events(http, CHAT, chat(stream=True)))
            await eventually(lambda: mesh.decode.num_steps == 3)
            await mesh.kill("tokenizer")
            for _ in HELLO:
                mesh.decode.steps.release()
            await mesh.start_tokenizer(mesh.tokenizer_address)
            payloads = await asking

        assert text_of(payloads) == HELLO


async def test_tokenizer_that_stays_away_is_an_error_in_time(mesh: FakeMesh) -> None:
    async with (
        connect("127.0.0.1:1") as channel,
        Detokenizer(channel, append_timeout_s=0.3) as detokenizer,
        detokenizer.open(job()) as text,
    ):
        with pytest.raises(DeadlineExceeded):
            await text.append(Chunk([65]))
