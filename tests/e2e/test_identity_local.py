"""Where one worker does it all, the stages of a request are all of its time too."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.accounts import (
    allowed_ms,
    answered_although_a_decoder_dies,
    check_adds_up,
    check_mostly_named,
    check_traces,
    finished,
)
from tests.e2e.harness import Collector, RunningMesh, pdmesh, start_mesh

NUM_STREAMS = 16
WANTED = {
    *("gateway.request", "tokenizer.encode", "scheduler.place"),
    *("decode.run", "tokenizer.detokenize"),
}


@pytest.fixture(scope="module")
def local_mesh(
    tmp_path_factory: pytest.TempPathFactory, model_home: Path, collector: tuple[Collector, str]
) -> Iterator[RunningMesh]:
    home = tmp_path_factory.mktemp("local")
    yield start_mesh(
        home,
        model_home,
        *("--prefill", "0", "--decode", "2"),
        # Room for a few prompts at once, and none kept for answers: some streams lose theirs.
        *("--set", "decode.num_blocks=64", "--set", "scheduler.reserved_output_tokens=0"),
        *("--otlp-endpoint", collector[1]),
    )
    pdmesh(home, "down")


async def test_the_stages_add_up_to_the_whole_under_sixteen_streams(
    local_mesh: RunningMesh, collector: tuple[Collector, str]
) -> None:
    async with httpx.AsyncClient(base_url=local_mesh.url, timeout=120) as http:
        accounts = await asyncio.gather(*(finished(http, one) for one in range(2 * NUM_STREAMS)))

    for account in accounts:
        check_adds_up(account)
        assert account["mode"] == "local"
        # Nothing moves beside the critical path: no worker claims more time than its call took.
        assert account["overlap_ms"] < allowed_ms(account), account
        assert {"prefill_wait", "prefill_compute", "decode_steps"} <= set(account["stages_ms"])
    check_mostly_named(accounts)
    await check_traces(collector[0], accounts, WANTED)


async def test_they_add_up_where_a_worker_died_and_where_blocks_were_taken_away(
    local_mesh: RunningMesh, collector: tuple[Collector, str]
) -> None:
    async with httpx.AsyncClient(base_url=local_mesh.url, timeout=120) as http:
        # Fresh numbers: what the first test left in the caches would make this one short.
        requests = [
            finished(http, number, max_tokens=100, stop=None)
            for number in range(100, 100 + NUM_STREAMS)
        ]
        accounts = await answered_although_a_decoder_dies(local_mesh, requests)

    assert sum(account["preemptions"] for account in accounts) > 0
    resumed = [account for account in accounts if account["attempts"] > 1]
    assert resumed
    for account in accounts:
        check_adds_up(account)
        assert account["status"] == 200
    for account in resumed:
        # Its prompt, and what it had said, were computed twice.
        assert account["stages_ms"]["prefill_compute"] > 0
    check_mostly_named(accounts)
    await check_traces(collector[0], accounts, WANTED)
