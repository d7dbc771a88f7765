"""Over the whole mesh, disaggregated and local, the tokens are those of `transformers`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from mesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from quality.prompts import VARIED_PROMPTS
from tests.e2e.harness import MODEL, RunningMesh, pdmesh, start_mesh
from tests.oracle import Oracle

pytestmark = pytest.mark.timeout(300)

# Prompts up to this length, and tokens of each. More is for `make bit-equality`; what one engine
# makes of all prompts is compared with transformers by tests/engine/test_parity.py.
SOME = (200, 24)
ALL = (4000, 100)
AT_ONCE = 16
EXACT = ["--dtype", "float32"]
EXACT += ["--set", "prefill.quantization=none", "--set", "decode.quantization=none"]


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    return {text[:20]: tokenizer.encode(text).ids for text in VARIED_PROMPTS}


async def generate_all(
    mesh: RunningMesh, prompts: Mapping[str, list[int]], num_tokens: int
) -> dict[str, list[int]]:
    """Greedy tokens of every prompt, `AT_ONCE` requests in flight."""
    turn = asyncio.Semaphore(AT_ONCE)
    async with grpc.aio.insecure_channel(mesh.state.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def generate(token_ids: list[int]) -> list[int]:
            request = inference_pb2.GenerateRequest(
                model=MODEL,
                prompt_token_ids=types_pb2.TokenSequence(token_ids=token_ids),
                sampling_params=types_pb2.SamplingParams(
                    max_tokens=num_tokens, temperature=0, ignore_eos=True
                ),
            )
            async with turn:
                events = [event async for event in stub.Generate(request, timeout=240)]
            return [token for event in events for token in event.delta.tokens.token_ids]

        answers = await asyncio.gather(*(generate(ids) for ids in prompts.values()))
    return dict(zip(prompts, answers, strict=True))


@asynccontextmanager
async def both_modes(folder: Path, model_home: Path) -> AsyncIterator[dict[str, RunningMesh]]:
    """A mesh of each, started and ended together."""
    modes = ("disaggregated", "local")
    try:
        started = await asyncio.gather(
            *(
                asyncio.to_thread(
                    start_mesh, folder / mode, model_home, *EXACT, f"--set=scheduler.mode={mode}"
                )
                for mode in modes
            )
        )
        yield dict(zip(modes, started, strict=True))
    finally:
        await asyncio.gather(*(asyncio.to_thread(pdmesh, folder / mode, "down") for mode in modes))


@pytest.mark.parametrize("extent", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)])
async def test_both_modes_give_the_tokens_of_transformers(
    extent: tuple[int, int],
    tmp_path: Path,
    model_home: Path,
    smollm2_path: Path,
    prompts: Mapping[str, list[int]],
) -> None:
    max_prompt_tokens, num_tokens = extent
    chosen = {name: ids for name, ids in prompts.items() if len(ids) <= max_prompt_tokens}
    assert len(chosen) >= 16
    async with both_modes(tmp_path, model_home) as meshes:
        answers = {
            mode: await generate_all(mesh, chosen, num_tokens) for mode, mesh in meshes.items()
        }
        pulls = {mode: mesh.services("kv_transfer")[0]["pulls"] for mode, mesh in meshes.items()}

    assert pulls["disaggregated"] > 0
    assert pulls["local"] == 0
    assert answers["local"] == answers["disaggregated"]
    oracle = Oracle(smollm2_path)
    for name, output_token_ids in answers["local"].items():
        expected = oracle.log_probabilities(prompts[name], output_token_ids)
        assert len(output_token_ids) == num_tokens
        assert expected.argmax(-1).tolist() == output_token_ids, name
