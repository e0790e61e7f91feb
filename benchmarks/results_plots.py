"""The plots of the results page: each function takes a result and a directory, writes SVG files there and returns their
names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aims
from results_sections import Result, on_gpus, place, types

from proxyccl.tools.options import show_size


def _save(figure: Any, path: Path) -> None:
    """Writes a figure without the date, so that the same results give the same file."""
    figure.savefig(path, metadata={"Date": None})


def _file(result: Result, name: str) -> str:
    return f"{name}.svg" if on_gpus(result) else f"{name}_host.svg"


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="both", linewidth=0.3)
    return figure, axes


def _by_size(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [show_size(size) for size in sizes], rotation=45)


def _plot_collective(result: Result, directory: Path) -> list[str]:
    name, ranks, dtype = result["benchmark"], result["world_size"], types(result)[0]
    rows = [row for row in result["results"] if row["type"] == dtype and row["time_us"]]
    files = []
    for key, unit, logarithmic in (("time_us", "time, µs", True), ("busbw_gbs", "bus bandwidth, GB/s", False)):
        figure, axes = _axes(f"{name}, {place(result).removeprefix('on ')}, {dtype}", "size", unit)
        for label, ours in dict.fromkeys((row["name"], row["ours"]) for row in rows):
            points = [(row["size"], row[key]) for row in rows if (row["name"], row["ours"]) == (label, ours)]
            style = "-" if ours else "--"
            axes.plot(*zip(*points, strict=True), style, marker="." if ours else "x", label=label)
        _by_size(axes, sorted({row["size"] for row in rows}))
        if logarithmic:
            axes.set_yscale("log")
        axes.legend(fontsize="small")
        files.append(_file(result, f"{name}_{ranks}_{key.split('_')[0]}"))
        _save(figure, directory / files[-1])
    return files


def _plot_put_signal(result: Result, directory: Path) -> list[str]:
    figure, axes = _axes("ProxyChannel: put with signal, one way", "size", "µs")
    rows = [row for row in result["latency"] if row["bytes"]]
    for label, key, style in (("median", "one_way_us", "-o"), ("limit", "limit_us", "kx"), ("aim", "aim_us", "g^")):
        points = [(row["bytes"], row[key]) for row in rows if row[key]]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    _by_size(axes, [row["bytes"] for row in rows])
    axes.set_yscale("log")
    axes.legend()
    latency = _file(result, "put_latency")
    _save(figure, directory / latency)
    figure, axes = _axes("SmChannel: copies to and from one peer", "blocks", "GB/s")
    for operation in ("put", "get"):
        points = [(row["blocks"], row["gbs"]) for row in result["sm_bandwidth"] if row["operation"] == operation]
        if points:
            axes.plot(*zip(*points, strict=True), "-o", label=operation)
    axes.plot(list(aims.SM_PUT_GBS), list(aims.SM_PUT_GBS.values()), "kx", label="limit of put")
    blocks = sorted({row["blocks"] for row in result["sm_bandwidth"]} | set(aims.SM_PUT_GBS))
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [str(each) for each in blocks])
    axes.set_ylim(bottom=0)
    axes.legend()
    bandwidth = _file(result, "sm_bandwidth")
    _save(figure, directory / bandwidth)
    return [latency, bandwidth]


def _plot_ring(result: Result, directory: Path) -> list[str]:
    if not result.get("kernels"):
        return []
    figure, axes = _axes("Triggers that kernels push", "", "million triggers a second")
    layouts = list(dict.fromkeys(row["producers"] for row in result["kernels"]))
    sizes = sorted({row["fifo_size"] for row in result["kernels"]})
    bars = [(f"engine, {size} slots", size, False) for size in sizes] + [("bare loop, best size", None, True)]
    width = 0.8 / len(bars)
    for i, (label, size, bare) in enumerate(bars):
        heights = []
        for layout in layouts:
            rows = [row for row in result["kernels"] if row["producers"] == layout and size in (None, row["fifo_size"])]
            heights.append(max((row["bare"] if bare else row)["median_per_s"] for row in rows) / 1e6 if rows else 0)
        axes.bar([x + i * width for x in range(len(layouts))], heights, width, label=label)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(layouts))], layouts, rotation=30)
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    rates = _file(result, "ring_rates")
    _save(figure, directory / rates)
    return [rates]


def _plot_expert_parallel(result: Result, directory: Path) -> list[str]:
    """Plots the time by the number of a rank's tokens: with local sums, with rows written once, and NCCL's time for the
    bytes that cross the link.
    """
    rows = {(row["name"], row["count"]): row for row in result["results"] if row["time_us"]}
    counts = sorted({count for _, count in rows})
    shown, ours = ("dispatch", "combine"), ("local", "written once")
    names = list(
        dict.fromkeys(name for name, _ in rows if "NCCL" in name or (name.endswith(ours) and name.startswith(shown)))
    )
    figure, axes = _axes(f"MoE {place(result)}, hidden {result['hidden']}", "tokens of a rank", "time, µs")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [rows[name, count]["time_us"] if (name, count) in rows else 0 for count in counts]
        hatch = "" if any(rows[name, count]["ours"] for count in counts if (name, count) in rows) else "//"
        axes.bar([x + i * width for x in range(len(counts))], heights, width, label=name, hatch=hatch)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(counts))], [str(count) for count in counts])
    axes.set_yscale("log")
    axes.legend(fontsize="x-small", ncols=2)
    name = _file(result, f"expert_parallel_{result['world_size']}")
    _save(figure, directory / name)
    return [name]


PLOTS: dict[str, Callable[[Result, Path], list[str]]] = {
    "all_reduce": _plot_collective,
    "all_gather": _plot_collective,
    "all_to_all": _plot_collective,
    "expert_parallel": _plot_expert_parallel,
    "put_signal": _plot_put_signal,
    "ring": _plot_ring,
}
