"""Whatever fails, and whenever: no stream is lost, changed or late, and nothing is left behind."""

import pytest

from tests.chaos.cells import MATRIX, Cell, run_cell
from tests.chaos.probe import MeshProbe
from tests.chaos.streams import Answer


@pytest.mark.matrix
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", MATRIX, ids=str)
async def test_matrix(cell: Cell, probe: MeshProbe, expected: list[Answer]) -> None:
    assert await run_cell(cell, probe, expected) == []
