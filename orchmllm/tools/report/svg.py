"""Charts as inline SVG whose colours are CSS variables of the page, so that they follow light and
dark. A chart is 360 units wide and meant to be shown at about that many pixels, so that its text
has the size of the page's on a phone and on a desktop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 46, 8, 8, 22
MAX_POINTS = 300  # of a line; more become the mean of equally many steps, with their range


@dataclass(frozen=True)
class Series:
    """name: in the legend. colour: a CSS variable without its dashes. x, y: (n,), of which y may
    have nan."""

    name: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    dots: bool = False


def number(value: float, unit: str = "") -> str:
    """Four digits, three with a unit: 1234 -> `1.234k`; `%` of a share; `-` for nan."""
    if not math.isfinite(value):
        return "-"
    if unit == "%":
        return f"{100 * value:.1f}%"
    if unit == "s" and 0 < abs(value) < 1:
        value, unit = 1e3 * value, "ms"
    size, prefix = next(((f, p) for f, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
                         if abs(value) >= f and unit not in ("s", "ms")), (1, ""))
    return f"{value / size:.{3 if unit else 4}g}{' ' * bool(unit)}{prefix}{unit}"


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, least, largest) of at most MAX_POINTS groups; those of nan alone are left out."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    num = min(len(x), MAX_POINTS)
    if not num:
        return x, y, y, y
    starts = np.arange(num) * len(x) // num
    counts = np.diff(np.append(starts, len(x)))
    return (np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts,
            np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def latest(values: np.ndarray) -> float:
    """Mean of the last twentieth of the finite ones of (n,) values; nan if none is."""
    known = values[np.isfinite(values)]
    return float(known[-max(1, len(known) // 20):].mean()) if len(known) else math.nan


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers within [low, high]."""
    raw = (high - low) / 5 or 1.0
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def chart(title: str, lines: Sequence[Series], *, unit: str = "", least: float | None = 0.0,
          stacked: bool = False, note: str = "",
          marks: Sequence[tuple[float, str]] = ()) -> str:
    """An HTML figure. least: the axis begins there at most; None: near the lowest value. stacked:
    the lines, with the same x, lie on each other as areas. marks: (x, text) of upright lines, whose
    texts a pointer shows."""
    shown = [(line, thin(line.x, line.y)) for line in lines]
    shown = [(line, points) for line, points in shown if len(points[0])]
    if not shown:
        return figure(title, "", '<p class="none">nothing logged yet</p>', note)
    if stacked:
        tops = np.cumsum([points[1] for _, points in shown], axis=0)
        low, high = 0.0, float(tops[-1].max())
    else:
        low = min(float(points[1].min()) for _, points in shown)
        high = max(float(points[1].max()) for _, points in shown)
        low = low if least is None else min(low, least)
    high = high if high > low else low + (abs(low) or 1.0)
    first = min(float(points[0][0]) for _, points in shown)
    last = max(float(points[0][-1]) for _, points in shown)

    def to_x(x: np.ndarray) -> np.ndarray:
        return LEFT + (x - first) / ((last - first) or 1.0) * (WIDTH - LEFT - RIGHT)

    def to_y(y: np.ndarray) -> np.ndarray:
        return HEIGHT - BOTTOM - (np.clip(y, low, high) - low) / (high - low) * (
            HEIGHT - TOP - BOTTOM)

    parts = [_axes(low, high, first, last, unit, to_x, to_y)]
    for i, (line, (x, mean, least_y, most_y)) in enumerate(shown):
        if stacked:
            base = tops[i - 1] if i else np.zeros(len(x))
            parts.append(_area(to_x(x), to_y(base), to_y(tops[i]), line.colour, 0.85))
            continue
        if len(line.x) > MAX_POINTS:
            parts.append(_area(to_x(x), to_y(least_y), to_y(most_y), line.colour, 0.18))
        points = list(zip(to_x(x), to_y(mean), strict=True))
        if len(points) > 1:
            parts.append(f'<polyline style="stroke:var(--{line.colour})" '
                         f'points="{_points(points)}"/>')
        if line.dots or len(points) == 1:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" style="fill:var(--{line.colour})"'
                      '/>' for a, b in points]
    parts += [_mark(float(to_x(np.float64(x))), text) for x, text in marks if first <= x <= last]
    legend = " ".join(
        f'<span><i style="background:var(--{line.colour})"></i>'
        f"{escape(line.name)} <b>{number(latest(line.y), unit)}</b></span>" for line, _ in shown)
    svg = (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
           + "".join(parts) + "</svg>")
    return figure(title, legend, svg, note)


def figure(title: str, legend: str, body: str, note: str) -> str:
    return (f"<figure><figcaption><h3>{escape(title)}</h3><p class=legend>{legend}</p></figcaption>"
            f"{body}" + (f"<p class=note>{escape(note)}</p>" if note else "") + "</figure>")


def _axes(low: float, high: float, first: float, last: float, unit: str, to_x, to_y) -> str:
    out = []
    for value in ticks(low, high):
        y = float(to_y(np.float64(value)))
        out.append(f'<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />'
                   f'<text x={LEFT - 5} y={y + 4:.1f} text-anchor=end>'
                   f"{number(value, '' if unit not in ('%', 's') else unit)}</text>")
    for value in ticks(first, last) if last > first else [first]:
        if value == int(value):
            x = float(to_x(np.float64(value)))
            where = "end" if x > WIDTH - 30 else "middle"
            out.append(f'<text x={x:.1f} y={HEIGHT - 6} text-anchor={where}>'
                       f"{number(value)}</text>")
    return "".join(out)


def _mark(x: float, text: str) -> str:
    return (f"<line class=mark x1={x:.1f} x2={x:.1f} y1={TOP} y2={HEIGHT - BOTTOM}>"
            f"<title>{escape(text)}</title></line>")


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, opacity: float) -> str:
    points = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
    return (f'<polygon style="fill:var(--{colour})" fill-opacity={opacity} '
            f'points="{_points(points)}"/>')


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
