"""What the transfer agent's tests stand on: segment files in shared memory, certificates."""

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.tls import TlsFiles
from tests.transfer_agents import RunningAgent, start_agent

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]


@pytest.fixture
def make_segment() -> Iterator[MakeSegment]:
    """Makes segment files whose bytes are random and differ between engines."""
    paths: list[Path] = []

    def make(
        engine_id: str, num_blocks: int = 16, block_bytes: int = 5000, fingerprint: str = "f1"
    ) -> SegmentSpec:
        path = Path(f"/dev/shm/pdmesh-test-{os.getpid()}-{engine_id}")
        paths.append(path)
        num_bytes = num_blocks * block_bytes
        # A prime number of bytes, again and again: no two blocks are equal.
        pattern = np.random.default_rng(len(paths)).bytes(1_000_003)
        path.write_bytes((pattern * (num_bytes // len(pattern) + 1))[:num_bytes])
        return SegmentSpec(engine_id, str(path), block_bytes, num_blocks, fingerprint)

    yield make
    for path in paths:
        path.unlink()


@pytest.fixture
async def start() -> AsyncIterator[StartAgent]:
    """Starts agents, each a machine of its own, that end with the test."""
    async with AsyncExitStack() as stack:

        async def start_one(**options: Any) -> RunningAgent:
            agent = await start_agent(**options)
            stack.push_async_callback(agent.stop)
            return agent

        yield start_one


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate for 127.0.0.1 that is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "cert.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        f"-subj /CN=agent -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {files.key} -out {files.certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return files
