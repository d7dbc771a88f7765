"""Forward progress as health."""

import math

from worker.progress import ProgressMonitor


class Engine:
    """Only its step's age matters."""

    def __init__(self) -> None:
        self.step_age_s = 0.0
        self.health: list[bool] = []

    async def set_health(self, makes_progress: bool) -> None:
        self.health.append(makes_progress)

    def monitor(self) -> ProgressMonitor:
        return ProgressMonitor(lambda: self.step_age_s, self.set_health, timeout_s=60)


async def test_step_that_hangs_is_reported_once_and_its_end_too() -> None:
    engine = Engine()
    monitor = engine.monitor()

    for age_s in (0.0, 59.0, 60.0, 61.0, 0.1, 0.2):
        engine.step_age_s = age_s
        await monitor.check()

    assert engine.health == [False, True]


async def test_engine_that_is_gone_makes_no_progress() -> None:
    engine = Engine()
    engine.step_age_s = math.inf

    await engine.monitor().check()

    assert engine.health == [False]
