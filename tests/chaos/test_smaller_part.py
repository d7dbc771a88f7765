"""The part of the chaos matrix that every run of the suite takes: each role and fault once."""

import pytest

from tests.chaos.cells import SHORT_FREEZE_S, Cell, Expected, Fault, Stage, run_cell
from tests.chaos.probe import MeshProbe

CELLS = [
    Cell("gateway", Fault.SIGKILL, Stage.DECODING),
    Cell("tokenizer", Fault.SIGKILL, Stage.QUEUED),
    Cell("scheduler", Fault.SIGKILL, Stage.QUEUED),
    Cell("prefill", Fault.SIGKILL, Stage.TRANSFERRING),
    Cell("decode", Fault.SIGSTOP, Stage.DECODING, SHORT_FREEZE_S),
    Cell("kv_transfer", Fault.RESTART, Stage.PREFILLING),
    Cell("redis", Fault.SIGKILL, Stage.TRANSFERRING),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_smaller_part(cell: Cell, probe: MeshProbe, expected: Expected) -> None:
    assert await run_cell(cell, probe, expected) == []
