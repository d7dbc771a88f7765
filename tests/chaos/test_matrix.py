"""Whatever fails, and whenever: no stream is lost, changed or late, and nothing is left behind."""

import pytest

from tests.chaos.cells import MATRIX, Cell, Expected, run_cell
from tests.chaos.probe import MeshProbe


@pytest.mark.matrix
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", MATRIX, ids=str)
async def test_matrix(cell: Cell, probe: MeshProbe, expected: Expected) -> None:
    assert await run_cell(cell, probe, expected) == []
