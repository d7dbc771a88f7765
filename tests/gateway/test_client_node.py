"""The npm client, real, against the gateway: `make node-client` installs it."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway

FOLDER = Path(__file__).parents[1] / "clients"


async def test_the_npm_client_notices_no_difference(
    gateway: RunningGateway, mesh: FakeMesh
) -> None:
    if shutil.which("node") is None or not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.fail("the npm client is missing: run `make node-client`", pytrace=False)
    mesh.scheduler.full = {b"user: once full\n": 1, b"user: always full\n": 100}
    mesh.model.failing = {b"user: breaks\n"}

    process = await asyncio.create_subprocess_exec(
        *("node", "check.mjs", f"{gateway.url}/v1", MODEL),
        cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()
    assert output.decode().split("\n")[-2] == "failure in a stream"
