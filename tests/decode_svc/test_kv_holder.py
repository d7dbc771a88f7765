"""The holder of remote KV as the decode worker sees it."""

import socket

import pytest

from decode_svc.kv_holder import HandoverLost, KvHolder, RemoteKv
from mesh import metrics
from mesh.client import Channels
from mesh.ports import find_free_ports
from mesh.v1 import types_pb2


def num_unreleased() -> float:
    lines = metrics.render()[0].decode().splitlines()
    name = "pdmesh_kv_cache_unreleased_handles_total "
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


async def test_a_handle_that_cannot_be_given_back_before_its_lease_ends_is_counted() -> None:
    before = num_unreleased()
    [nobody] = find_free_ports(1)
    handle = types_pb2.KvHandle(handle_id="h", holder_address=f"127.0.0.1:{nobody}")
    handle.lease_expires_at.GetCurrentTime()

    async with Channels() as channels:
        holder = KvHolder(channels, RemoteKv(handle), timeout_s=1)
        holder.start_renewing()
        await holder.release_in_the_end()

    assert num_unreleased() == before + 1


async def test_prefill_that_nobody_waits_for_any_more_is_not_followed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        handle = types_pb2.KvHandle(handle_id="h", holder_address=address)
        handle.lease_expires_at.FromSeconds(2**31)

        async with Channels() as channels:
            holder = KvHolder(channels, RemoteKv(handle), timeout_s=1)
            holder.start_renewing()
            holder.stop()
            with pytest.raises(HandoverLost, match="nobody waits"):
                await holder.first_token()

        with pytest.raises(BlockingIOError):
            silent.accept()
