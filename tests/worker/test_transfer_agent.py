"""What a worker can tell of an agent that does not answer."""

import socket

import pytest

from mesh.client import Channels
from worker.transfer_agent import TransferAgent


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
async def test_agent_that_is_gone_writes_no_more(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as unheard:
        try:
            unheard.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host}: {error}")
        port = unheard.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        async with Channels() as channels:
            assert await TransferAgent(channels, address).is_quiet("r1")
