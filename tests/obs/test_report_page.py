"""A benchmark's report in a real browser: the plots are drawn, and nothing is fetched."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.bench.knee import find_knee
from mesh.bench.report import render
from tests.bench.made import point, recording, result, window
from tests.obs.browser import Browser

pytestmark = pytest.mark.asyncio(loop_scope="module")

DRAWN = """
return [...document.querySelectorAll('svg')].map((svg) => {
  const box = svg.getBoundingClientRect();
  const lines = [...svg.querySelectorAll('polyline, path')];
  return {
    title: svg.getAttribute('aria-label'),
    width: box.width,
    height: box.height,
    longest: Math.max(0, ...lines.map((one) => one.getTotalLength())),
    spills: [...svg.querySelectorAll('text')].some((text) => {
      const place = text.getBoundingClientRect();
      return place.left < box.left - 1 || place.right > box.right + 1;
    }),
  };
});
"""


def report() -> str:
    """Of a sweep with a knee, as `pdmesh bench chat --sweep --report` writes it."""
    points = []
    for concurrency, num_requests in ((1, 4), (2, 8), (4, 15), (8, 20), (16, 21), (32, 21)):
        recordings = [
            recording(0.01 * number, ttft_s=0.05 + 0.01 * number, tpot_s=0.004 + 0.001 * number)
            for number in range(num_requests)
        ]
        points.append(point(f"{concurrency} at once", concurrency, [window(recordings)]))
    made = result(points)
    return render(replace(made, knee=find_knee(points, made.main_group)))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (380, "dark")])
async def test_the_plots_of_a_report_are_drawn_without_asking_anybody(
    page: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(report(), encoding="utf-8")
    await page.resize(width, 900)
    await page.prefer(scheme)

    await page.open(file.as_uri())

    plots = await page.run(DRAWN)
    assert len(plots) >= 7
    for plot in plots:
        assert plot["width"] > 200, plot
        assert plot["height"] > 100, plot
        assert plot["longest"] > 50, plot
        assert not plot["spills"], plot
    assert await page.run("return performance.getEntriesByType('resource').length") == 0
    assert await page.console() == []
    assert await page.run("return document.documentElement.scrollWidth") <= width
    text = await page.run("return document.body.innerText")
    for fact in ("Hardware", "Model and precision", "Cold or warm", "Statistic", "at the knee"):
        assert fact in text
