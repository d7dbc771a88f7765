"""The transfer agent as a process."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer_svc.config import KvTransferConfig
from kv_transfer_svc.segments import SegmentSpec
from mesh.client import connect
from mesh.config import ConfigError, read
from mesh.ports import find_free_ports
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("listen", ["0.0.0.0:50060", "[::]:50060"])
def test_listening_everywhere_needs_the_address_that_workers_use(
    monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    """Else the tiers would be published under an address that no worker has, and never asked."""
    monkeypatch.setenv("PDMESH_LISTEN", listen)
    with pytest.raises(ConfigError, match="advertise_address"):
        read(KvTransferConfig)

    monkeypatch.setenv("PDMESH_ADVERTISE_ADDRESS", "10.0.0.1:50060")
    assert read(KvTransferConfig).listen == listen


@pytest.mark.parametrize("name", ["stall_timeout_s", "connect_timeout_s"])
def test_a_wait_that_no_socket_can_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"PDMESH_{name.upper()}", "inf")

    with pytest.raises(ConfigError, match=name.upper()):
        read(KvTransferConfig)


async def test_process_ends_at_once_though_segments_are_attached(
    make_segment: Callable[..., SegmentSpec],
) -> None:
    spec = make_segment("p")
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDMESH_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kv_transfer_svc",
        env={**env, "PDMESH_LISTEN": address, "PDMESH_DRAIN_TIMEOUT_S": "30"},
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with connect(address) as channel:
            call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).AttachSegment(
                kv_transfer_pb2.AttachSegmentRequest(
                    engine_id=spec.engine_id,
                    path=spec.path,
                    block_bytes=spec.block_bytes,
                    num_blocks=spec.num_blocks,
                    layout_fingerprint=spec.layout_fingerprint,
                ),
                wait_for_ready=True,
                timeout=30,
            )
            await anext(aiter(call))

            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
