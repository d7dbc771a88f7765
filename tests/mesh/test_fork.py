"""What `pdmesh up` forks is to become another program, and nothing else until then."""

import subprocess
import sys

SCRIPT = """
import asyncio, os
import mesh.cli.main, mesh.cli.up
import grpc.aio

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    for _ in range(10):
        if (pid := os.fork()) == 0:
            os._exit(len(os.listdir("/proc/self/task")))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    await server.stop(0)

asyncio.run(main())
"""


def test_grpc_starts_no_thread_in_a_child_of_up() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )

    assert result.stdout.split() == ["1"] * 10, result.stderr
