"""Two agents as processes in two network namespaces: nothing in common but a wire."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh.client import connect, mesh_errors
from mesh.errors import KvTransferFailed
from mesh.ports import find_free_ports
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

NAME = f"pdmesh-{os.getpid()}"
# Networks of four addresses, one for each process that runs tests here.
_NETWORK = f"10.{200 + os.getpid() // 64 // 256 % 16}.{os.getpid() // 64 % 256}."
HERE, THERE = (f"{_NETWORK}{os.getpid() % 64 * 4 + end}" for end in (1, 2))
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 19


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[str]:
    """A second namespace, and the name of this side's end of the wire to it."""
    end, other_end = f"pdm{os.getpid()}a"[-15:], f"pdm{os.getpid()}b"[-15:]
    with ExitStack() as stack:
        try:
            ip("netns", "add", NAME)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        stack.callback(ip, "netns", "del", NAME)
        ip("link", "add", end, "type", "veth", "peer", "name", other_end, "netns", NAME)
        # A namespace takes its time to go, and its wires with it.
        stack.callback(ip, "link", "del", end)
        ip("addr", "add", f"{HERE}/30", "dev", end)
        ip("link", "set", end, "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", other_end)
        ip("-n", NAME, "link", "set", other_end, "up")
        yield end


@pytest.fixture
async def agents(link: str, tmp_path: Path) -> AsyncIterator[list[tuple[Any, str]]]:
    """Stub and address of the agent here, with engine `d`, and of the one there, with `p`."""
    async with AsyncExitStack() as stack:
        found = []
        [port] = find_free_ports(1)
        for host, engine_id, prefix in (
            (HERE, "d", []),
            (THERE, "p", ["ip", "netns", "exec", NAME]),
        ):
            address = f"{host}:{port}"
            environment = {
                **os.environ,
                "PDMESH_LISTEN": address,
                "PDMESH_STALL_TIMEOUT_S": "1",
                "PDMESH_LOG_LEVEL": "ERROR",
                "PDMESH_HOST_MEMORY_BYTES": "0",
            }
            process = subprocess.Popen(  # noqa: ASYNC220
                [*prefix, sys.executable, "-m", "kv_transfer_svc"], env=environment
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            channel = connect(address)
            stack.push_async_callback(channel.close)
            await asyncio.wait_for(channel.channel_ready(), 20)
            stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
            path = tmp_path / engine_id
            await asyncio.to_thread(path.write_bytes, os.urandom(NUM_BLOCKS * BLOCK_BYTES))
            call = stub.AttachSegment(
                kv_transfer_pb2.AttachSegmentRequest(
                    engine_id=engine_id,
                    path=str(path),
                    block_bytes=BLOCK_BYTES,
                    num_blocks=NUM_BLOCKS,
                    layout_fingerprint="f",
                )
            )
            stack.callback(call.cancel)
            await anext(aiter(call))
            found.append((stub, address))
        yield found


async def pull(stub: Any, source_address: str, block_ids: list[int]) -> None:
    with mesh_errors():
        await stub.Pull(
            kv_transfer_pb2.PullRequest(
                source_engine_id="p",
                source_block_ids=block_ids,
                destination_engine_id="d",
                destination_block_ids=range(len(block_ids)),
                source_address=source_address,
            ),
            timeout=10,
        )


def read_blocks(path: Path) -> Any:
    return np.frombuffer(path.read_bytes(), np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)


async def test_blocks_cross_from_one_namespace_to_another(
    agents: list[tuple[Any, str]], tmp_path: Path
) -> None:
    (here, _), (_, there) = agents
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()

    await pull(here, there, order)

    assert np.array_equal(read_blocks(tmp_path / "d"), read_blocks(tmp_path / "p")[order])


async def test_cut_wire_fails_the_pull_within_bounds_and_heals(
    agents: list[tuple[Any, str]], link: str, tmp_path: Path
) -> None:
    # KV-19
    (here, _), (_, there) = agents
    await pull(here, there, [0])
    ip("link", "set", link, "down")
    try:
        async with asyncio.timeout(20):
            with pytest.raises(KvTransferFailed):
                await pull(here, there, [1, 2])
    finally:
        ip("link", "set", link, "up")

    async with asyncio.timeout(10):
        while True:
            try:
                await pull(here, there, [3])
            except KvTransferFailed:
                await asyncio.sleep(0.2)
            else:
                break
    assert np.array_equal(read_blocks(tmp_path / "d")[0], read_blocks(tmp_path / "p")[3])
