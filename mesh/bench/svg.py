"""Line charts as inline SVG: no script, no network, readable in the dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 30, 44
_NUM_TICKS = 5
# Told apart by colour-blind readers too (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Marker:
    """A vertical line with a word."""

    x: float
    text: str


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    marker: Marker | None = None,
    log_x: bool = False,
) -> str:
    """An SVG element; an empty string if there is nothing to draw."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    across = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, is_log=log_x and min(xs) > 0)
    up = _Axis(0.0, max(ys) or 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
        *_grid(across, up, sorted(set(xs)) if log_x else across.ticks()),
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" class="middle">'
        f"{escape(x_label)}</text>",
        f'<text transform="rotate(-90 12 {HEIGHT / 2})" x="12" y="{HEIGHT / 2}" class="middle">'
        f"{escape(y_label)}</text>",
    ]
    if marker is not None:
        x = across.place(marker.x)
        parts.append(
            f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text x="{x + 4:.1f}" y="{_TOP + 10}">{escape(marker.text)}</text>'
        )
    parts += [_line(each, COLORS[i % len(COLORS)], across, up) for i, each in enumerate(drawn)]
    parts += _legend(drawn)
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        if high == low:
            return (self.start + self.end) / 2
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within the axis."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10 ** math.floor(math.log10(span / _NUM_TICKS))
        step *= next((factor for factor in (1, 2, 5) if span / (step * factor) <= _NUM_TICKS), 10)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(across: _Axis, up: _Axis, x_ticks: Sequence[float]) -> list[str]:
    parts: list[str] = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:,.6g}</text>'
        )
    for value in x_ticks:
        x = across.place(value)
        parts.append(
            f'<text class="middle" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}">{value:,.6g}</text>'
        )
    return parts


def _line(series: Series, color: str, across: _Axis, up: _Axis) -> str:
    places = [(across.place(x), up.place(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = ""
    if len(places) <= 20:
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places
        )
    return f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>{dots}'


def _legend(series: Sequence[Series]) -> list[str]:
    # At the left, where curves that rise leave room.
    return [
        f'<rect x="{_LEFT + 10}" y="{_TOP + 4 + 16 * i}" width="10" height="10" '
        f'fill="{COLORS[i % len(COLORS)]}"/><text x="{_LEFT + 25}" '
        f'y="{_TOP + 13 + 16 * i}">{escape(each.name)}</text>'
        for i, each in enumerate(series)
        if len(series) > 1
    ]
