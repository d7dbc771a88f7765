"""How fast KV moves between engines, with the plain thing beside it.

    python -m benchmarks.kv_transfer

A prompt of 4,000 tokens of the default model, 94 MB: through shared memory beside a memcpy by
one thread, and over TCP between two agents beside two processes that do nothing but send and
receive over as many streams. Rounds alternate, so that both sides meet the same machine.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mesh.client import connect
from mesh.ports import find_free_ports
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mesh.v1.kv_transfer_pb2_grpc import KvTransferServiceAsyncStub

# SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads of 64, 16 tokens.
BLOCK_BYTES = 30 * 2 * 3 * 64 * 16 * 2
NUM_BLOCKS = 4000 // 16
PAYLOAD_BYTES = BLOCK_BYTES * NUM_BLOCKS


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=4)
    arguments = parser.parse_args()
    async with AsyncExitStack() as stack:
        agents = [
            stack.enter_context(_agent(port, arguments.streams)) for port in find_free_ports(2)
        ]
        stubs = []
        for address in agents:
            channel = connect(address)
            stack.push_async_callback(channel.close)
            await asyncio.wait_for(channel.channel_ready(), 20)
            stubs.append(kv_transfer_pb2_grpc.KvTransferServiceStub(channel))
        here, there = stubs
        await _attach(stack, here, "near")
        await _attach(stack, here, "destination")
        await _attach(stack, there, "far")
        copy = _memcpy()
        raw = stack.enter_context(_raw_socket_copy(arguments.streams))
        paces: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for name, measure in (("memcpy, one thread", copy), ("raw sockets", raw)):
                paces.setdefault(name, []).append(await asyncio.to_thread(measure))
            for name, source in (("shared memory", "near"), ("TCP", "far")):
                paces.setdefault(name, []).append(await _pull(here, source, agents[1]))
    _report(paces, arguments.streams)


async def _pull(agent: "KvTransferServiceAsyncStub", source: str, source_address: str) -> float:
    """GB/s as the caller sees it: the call included."""
    block_ids = range(NUM_BLOCKS)
    request = kv_transfer_pb2.PullRequest(
        source_engine_id=source,
        source_block_ids=block_ids,
        destination_engine_id="destination",
        destination_block_ids=block_ids,
        source_address=source_address,
    )
    started_at = time.perf_counter()
    await agent.Pull(request, timeout=30)
    return PAYLOAD_BYTES / (time.perf_counter() - started_at) / 1e9


async def _attach(
    stack: AsyncExitStack, agent: "KvTransferServiceAsyncStub", engine_id: str
) -> None:
    path = stack.enter_context(_segment(engine_id))
    call = agent.AttachSegment(
        kv_transfer_pb2.AttachSegmentRequest(
            engine_id=engine_id,
            path=str(path),
            block_bytes=BLOCK_BYTES,
            num_blocks=NUM_BLOCKS,
            layout_fingerprint="bench",
        )
    )
    stack.callback(call.cancel)
    await anext(aiter(call))


@contextmanager
def _segment(engine_id: str) -> Iterator[Path]:
    path = Path(f"/dev/shm/pdmesh-bench-{os.getpid()}-{engine_id}")
    try:
        path.write_bytes(np.random.default_rng(0).bytes(PAYLOAD_BYTES))
        yield path
    finally:
        path.unlink()


@contextmanager
def _agent(port: int, num_streams: int) -> Iterator[str]:
    address = f"127.0.0.1:{port}"
    environment = {
        **os.environ,
        "PDMESH_LISTEN": address,
        "PDMESH_NUM_STREAMS": str(num_streams),
        "PDMESH_LOG_LEVEL": "WARNING",
    }
    process = subprocess.Popen([sys.executable, "-m", "kv_transfer_svc"], env=environment)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def _memcpy() -> Callable[[], float]:
    source = np.frombuffer(np.random.default_rng(0).bytes(PAYLOAD_BYTES), np.uint8)
    destination = np.zeros_like(source)

    def measure() -> float:
        started_at = time.perf_counter()
        np.copyto(destination, source)
        return PAYLOAD_BYTES / (time.perf_counter() - started_at) / 1e9

    return measure


@contextmanager
def _raw_socket_copy(num_streams: int) -> Iterator[Callable[[], float]]:
    """Two processes; each stream carries its share of the bytes from memory to memory."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sender = spawn.Process(target=_send_for_ever, args=(theirs, num_streams), daemon=True)
    sender.start()
    with ExitStack() as stack:
        address = ours.recv()
        streams = [
            stack.enter_context(socket.create_connection(address)) for _ in range(num_streams)
        ]
        shares = np.array_split(np.zeros(PAYLOAD_BYTES, np.uint8), num_streams)

        def measure() -> float:
            receivers = [
                threading.Thread(target=_receive, args=(stream, share.data))
                for stream, share in zip(streams, shares, strict=True)
            ]
            started_at = time.perf_counter()
            ours.send("go")
            for receiver in receivers:
                receiver.start()
            for receiver in receivers:
                receiver.join()
            return PAYLOAD_BYTES / (time.perf_counter() - started_at) / 1e9

        yield measure
    ours.close()
    sender.join()


def _send_for_ever(pipe: "Connection", num_streams: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    streams = [listener.accept()[0] for _ in range(num_streams)]
    source = np.frombuffer(np.random.default_rng(0).bytes(PAYLOAD_BYTES), np.uint8)
    shares = np.array_split(source, num_streams)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        senders = [
            threading.Thread(target=stream.sendall, args=(share.data,))
            for stream, share in zip(streams, shares, strict=True)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()


def _receive(stream: socket.socket, share: memoryview) -> None:
    while len(share):
        share = share[stream.recv_into(share) :]


def _report(paces: dict[str, list[float]], num_streams: int) -> None:
    medians = {name: statistics.median(values) for name, values in paces.items()}
    print(f"{PAYLOAD_BYTES / 1e6:.0f} MB, {num_streams} streams, {os.cpu_count()} cores")
    for name, values in paces.items():
        print(f"{name:20} {medians[name]:6.2f} GB/s  (best {max(values):.2f})")
    for name, plain in (("shared memory", "memcpy, one thread"), ("TCP", "raw sockets")):
        # Of neighbouring rounds, so that a busy moment counts on both sides.
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(paces[name], paces[plain], strict=True)
        )
        print(f"{name} / {plain}: {ratio:.0%}")


if __name__ == "__main__":
    asyncio.run(main())
