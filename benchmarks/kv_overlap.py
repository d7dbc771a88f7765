"""How much of a KV transfer is left to wait for once prefill has ended.

    python -m benchmarks.kv_overlap MODEL_FOLDER

One prefill and one decode worker and their agents, as processes. Prompts of 4,000 tokens are
handed over after prefill and while it runs. What decode reports as its KV transfer begins when the
prefill worker's engine has sampled the first token, not when decode hears of it, and ends when
decode's engine may use the last block; after prefill, it begins when decode is asked.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from mesh.client import connect
from mesh.ports import find_free_ports
from mesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

NUM_TOKENS = 4000
PARAMS = types_pb2.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machines", type=int, choices=(1, 2), default=1)
    arguments = parser.parse_args()
    here, there, prefill_port, decode_port = find_free_ports(4)
    source = here if arguments.machines == 1 else there
    async with AsyncExitStack() as stack:
        for port in {here, source}:
            stack.enter_context(_service("kv_transfer_svc", port))
        stack.enter_context(_worker("prefill", prefill_port, source, arguments.model))
        stack.enter_context(_worker("decode", decode_port, here, arguments.model))
        channels = [connect(f"127.0.0.1:{port}") for port in (prefill_port, decode_port)]
        for channel in channels:
            stack.push_async_callback(channel.close)
            await asyncio.wait_for(channel.channel_ready(), 60)
        await asyncio.sleep(1)  # until both segments are attached
        exposed_ms: dict[bool, list[float]] = {False: [], True: []}
        for number in range(arguments.rounds):
            for is_overlapped, values in exposed_ms.items():
                drawn = random.Random(2 * number + is_overlapped)
                prompt = [drawn.randrange(1000, 40000) for _ in range(NUM_TOKENS)]
                request_id = f"bench-{number}-{is_overlapped}"
                values.append(await _hand_over(channels, request_id, prompt, is_overlapped))
    after, during = (statistics.median(exposed_ms[key]) for key in (False, True))
    print(f"{NUM_TOKENS} tokens, {arguments.machines} machine(s)")
    print(f"handed over after prefill: {after:7.2f} ms from the first token to the last block")
    print(f"handed over during prefill: {during:6.2f} ms, {during / after:.1%} of it")


async def _hand_over(
    channels: list[grpc.aio.Channel], request_id: str, prompt: list[int], is_overlapped: bool
) -> float:
    """Milliseconds that decode waits for KV once the first token exists."""
    prefill = prefill_pb2_grpc.PrefillServiceStub(channels[0])
    decode = decode_pb2_grpc.DecodeServiceStub(channels[1])
    request = decode_pb2.DecodeRequest(
        request_id=request_id,
        model="bench",
        prompt_token_ids=prompt,
        sampling_params=PARAMS,
        awaits_first_token=is_overlapped,
    )
    decoding: asyncio.Task[float] | None = None
    async for event in prefill.Prefill(
        prefill_pb2.PrefillRequest(
            request_id=request_id,
            model="bench",
            prompt_token_ids=prompt,
            sampling_params=PARAMS,
        )
    ):
        if is_overlapped and event.progress.HasField("kv_handle"):
            request.kv_handle.CopyFrom(event.progress.kv_handle)
            decoding = asyncio.create_task(_decode(decode, request))
        elif not is_overlapped and event.HasField("finished"):
            request.kv_handle.CopyFrom(event.finished.kv_handle)
            request.output_token_ids.extend(event.finished.first_token.token_ids)
            decoding = asyncio.create_task(_decode(decode, request))
    assert decoding is not None, "a prompt of several chunks has an early handle"
    return await decoding


async def _decode(stub: Any, request: decode_pb2.DecodeRequest) -> float:
    async for event in stub.Decode(request):
        if event.HasField("finished"):
            stages = {timing.stage: timing.duration_ms for timing in event.finished.timings}
            print(request.request_id, event.finished.kv_transfer_bytes, stages)
            return float(stages.get(types_pb2.STAGE_KV_TRANSFER, 0.0))
    raise RuntimeError("decode ended without an end")


def _worker(role: str, port: int, agent_port: int, model: Path) -> Any:
    return _service(
        f"{role}_svc",
        port,
        MODEL="bench",
        MODEL_PATH=str(model),
        WORKER_ID=f"bench-{os.getpid()}-{role}",
        KV_TRANSFER_ADDRESS=f"127.0.0.1:{agent_port}",
        NUM_THREADS="1",
    )


@contextmanager
def _service(module: str, port: int, **settings: str) -> Iterator[None]:
    environment = {
        **os.environ,
        "PDMESH_LISTEN": f"127.0.0.1:{port}",
        # Nobody listens there: the mesh does without.
        "PDMESH_REDIS_URL": "redis://127.0.0.1:9/0",
        "PDMESH_LOG_LEVEL": "ERROR",
        **{f"PDMESH_{name}": value for name, value in settings.items()},
    }
    process = subprocess.Popen([sys.executable, "-m", module], env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    asyncio.run(main())
