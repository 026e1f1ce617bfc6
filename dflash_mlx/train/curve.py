"""The learning curve as a picture: acceptance on held-out data over training time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 360, 52


def svg(points: Sequence[dict[str, Any]]) -> str:
    """points: each with `seconds` of training and `acceptance_length`; one line and a dot for each."""
    minutes = [point["seconds"] / 60 for point in points]
    lengths = [point["acceptance_length"] for point in points]
    last = max(minutes[-1], 1e-9)
    low, high = int(min(lengths) * 10) / 10, (int(max(lengths) * 10) + 1) / 10

    def x(value: float) -> float:
        return round(MARGIN + value / last * (WIDTH - 2 * MARGIN), 1)

    def y(value: float) -> float:
        return round(HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN), 1)

    at = [(x(a), y(b)) for a, b in zip(minutes, lengths, strict=True)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle">Acceptance length on held-out data</text>',
    ]
    for i in range(5):
        value, minute = low + (high - low) * i / 4, last * i / 4
        lines += [
            f'<path d="M{MARGIN} {y(value)}H{WIDTH - MARGIN}" stroke="#ddd"/>',
            f'<text x="{MARGIN - 6}" y="{y(value) + 4}" text-anchor="end">{value:.2f}</text>',
            f'<text x="{x(minute)}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{minute:.3g}</text>',
        ]
    lines += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">minutes of training</text>',
        f'<polyline points="{" ".join(f"{a},{b}" for a, b in at)}" fill="none" stroke="#0068b5" stroke-width="2"/>',
        *(f'<circle cx="{a}" cy="{b}" r="3" fill="#0068b5"/>' for a, b in at),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
