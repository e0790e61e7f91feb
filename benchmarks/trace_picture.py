"""Draws a part of a file of `proxyccl trace` as SVG: python benchmarks/trace_picture.py TRACE.json PICTURE.svg

The picture shows one burst of triggers or sends, such as the triggers of one collective call, between two pauses of all
proxies. The picture shows the burst of median length among the bursts with the most frequent number of triggers. Use
Perfetto to see the whole file; the pictures are for documentation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_WIDTH, _LEFT, _RIGHT = 1000, 190, 20
_ROW, _BAR, _TOP = 17, 12, 34
_COLOURS = {"issue": "#c65d1e", "transfer": "#3b7fb8"}
_TICKS = 6


def bursts(spans: list[Event], pause_us: float) -> Iterator[list[Event]]:
    """Yields a list of spans for each burst. Pauses of at least `pause_us` µs separate bursts."""
    burst: list[Event] = []
    end = 0.0
    for span in sorted(spans, key=lambda span: float(span["ts"])):
        if burst and span["ts"] > end + pause_us:
            yield burst
            burst = []
        burst.append(span)
        end = max(end if len(burst) > 1 else 0.0, span["ts"] + span["dur"])
    if burst:
        yield burst


def _length(burst: list[Event]) -> float:
    return float(max(span["ts"] + span["dur"] for span in burst) - burst[0]["ts"])


def _triggers(burst: list[Event]) -> int:
    return sum(int(span["args"]["count"]) for span in burst if span["cat"] == "issue")


def usual(of: list[list[Event]]) -> list[Event]:
    """Returns the burst of median length among the bursts with the most frequent number of triggers."""
    count = Counter(map(_triggers, of)).most_common(1)[0][0]
    alike = sorted((burst for burst in of if _triggers(burst) == count), key=_length)
    return alike[len(alike) // 2]


def _step(length: float) -> float:
    factor = 1.0
    while factor * 10 * _TICKS < length:
        factor *= 10
    return next(step * factor for step in (1, 2, 5, 10) if step * factor * _TICKS >= length)


def picture(events: list[Event], pause_us: float) -> str:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"].partition(" of ")[0] for e in events if e["name"] == "process_name"}
    burst = usual(list(bursts([e for e in events if e["ph"] == "X"], pause_us)))
    start, length = burst[0]["ts"], _length(burst)
    tracks = sorted({(e["pid"], e["tid"]) for e in burst})
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    rows: dict[tuple[int, int], float] = {}
    body = []
    y = float(_TOP)
    for pid, name in sorted(ranks.items()):
        own = [track for track in tracks if track[0] == pid]
        if not own:
            continue
        body.append(f'<text x="8" y="{y + _BAR}" font-weight="bold">{escape(name)}</text>')
        for track in own:
            rows[track] = y
            body.append(f'<text x="{_LEFT - 8}" y="{y + _BAR - 2}" text-anchor="end">{escape(names[track])}</text>')
            body.append(f'<path d="M{_LEFT} {y + _BAR + 2.5}H{_WIDTH - _RIGHT}" stroke="#eee"/>')
            y += _ROW
        y += 8
    step = _step(length)
    for i in range(int(length / step) + 1):
        x = _LEFT + i * step * scale
        body.append(f'<path d="M{x:.1f} {_TOP - 6}V{y}" stroke="#ddd"/>')
        body.append(f'<text x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">{i * step:g} µs</text>')
    for e in burst:
        x, width = _LEFT + (e["ts"] - start) * scale, max(1.0, e["dur"] * scale)
        title = f"{e['name']}, channel {e['args']['channel']}, {e['dur']:.1f} µs"
        body.append(
            f'<rect x="{x:.1f}" y="{rows[e["pid"], e["tid"]]}" width="{width:.1f}" height="{_BAR}" '
            f'fill="{_COLOURS[e["cat"]]}" stroke="white" stroke-width="0.5"><title>{escape(title)}</title></rect>'
        )
    size = f'viewBox="0 0 {_WIDTH} {y:.0f}" width="{_WIDTH}" height="{y:.0f}"'
    style = 'font-family="sans-serif" font-size="11"'
    return "\n".join(
        (f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', '<rect width="100%" height="100%" fill="white"/>',
         *body, "</svg>\n")
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a file that `proxyccl trace` wrote")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--pause", type=float, default=200.0, help="µs between two bursts (default %(default)s)")
    parsed = parser.parse_args()
    parsed.picture.write_text(picture(json.loads(parsed.trace.read_text())["traceEvents"], parsed.pause))
    return 0


if __name__ == "__main__":
    sys.exit(main())
