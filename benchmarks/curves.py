"""Curves over each other as an SVG, without a plotting library."""

from __future__ import annotations

from pathlib import Path

COLOURS = ("#222222", "#d95f02", "#1b9e77", "#7570b3")


def smoothed(values: list[float], width: int) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width)
            for i in range(len(values))]  # fmt: skip


def draw(
    curves: dict[str, list[float]], path: Path, *, x: str, y: str, smooth: int = 10
) -> None:
    """The curves over each other (mean of `smooth` points), as an SVG with axes named x and y."""
    width, height, left, bottom = 760, 400, 60, 40
    lines = {name: smoothed(values, smooth) for name, values in curves.items()}
    low = min(min(v) for v in lines.values())
    high = max(max(v) for v in lines.values())
    steps = max(len(v) for v in lines.values())

    def across(step: float) -> float:
        return left + step / max(1, steps - 1) * (width - left - 20)

    def down(value: float) -> float:
        return 20 + (high - value) / (high - low) * (height - bottom - 20)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12">'
             f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for tick in range(6):
        value = low + (high - low) * tick / 5
        parts.append(f'<path d="M{left} {down(value):.1f}H{width - 20}" stroke="#ddd"/>'
                     f'<text x="8" y="{down(value) + 4:.1f}">{value:.2f}</text>')  # fmt: skip
        step = (steps - 1) * tick // 5
        parts.append(f'<text x="{across(step) - 8:.1f}" y="{height - 18}">{step}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 4}">{x}</text>'
                 f'<text x="{left + 6}" y="14">{y}</text>')  # fmt: skip
    rising = all(values[-1] > values[0] for values in lines.values())
    legend = height - bottom - 18 * len(lines) if rising else 40  # the corner without lines
    for index, (name, values) in enumerate(lines.items()):
        points = " ".join(f"{across(i):.1f},{down(v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[index]}" '
                     'stroke-width="1.5" stroke-opacity="0.8"/>'
                     f'<text x="{width - 220}" y="{legend + 18 * index}" fill="{COLOURS[index]}">'
                     f"{name}</text>")  # fmt: skip
    path.write_text("\n".join([*parts, "</svg>"]))
