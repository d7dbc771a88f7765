"""A decode worker with a scripted engine, and a channel to it."""

from collections.abc import AsyncIterator

import pytest

from decode_svc.kv_import import KvImportLimits
from tests.decode_svc.decode_calls import Stub
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import DecodeRig, decode_stub


@pytest.fixture
def engine() -> ScriptedEngineLoop:
    return ScriptedEngineLoop()


@pytest.fixture
def limits() -> KvImportLimits:
    """Nothing times out, unless the test is about that (`gives_up_soon`)."""
    return KvImportLimits(pull_timeout_s=60, release_timeout_s=60)


@pytest.fixture
async def rig(engine: ScriptedEngineLoop, limits: KvImportLimits) -> DecodeRig:
    return DecodeRig(engine, limits)


@pytest.fixture
async def stub(rig: DecodeRig) -> AsyncIterator[Stub]:
    async with decode_stub(rig) as stub:
        yield stub
