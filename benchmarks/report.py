"""Makes the results page: python report.py [DIRECTORY]

It reads every JSON file of the programs there, whatever its name, and writes README.md and plots beside them. Of
several results of one program with as many ranks the latest is shown. Plots need matplotlib (the extra `bench`);
without it the page has its tables alone, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import aims

from proxyccl.channels.tools.options import show_size

Result = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
_RING_LAYOUT_AIMS = {
    "1 block of 128": aims.RING_FULL_BLOCKS_M,
    "8 blocks of 256": aims.RING_FULL_BLOCKS_M,
    "8 blocks of 32": aims.RING_ANY_LAYOUT_M,
    "64 blocks of 1": aims.RING_ANY_LAYOUT_M,
    "512 blocks of 1": aims.RING_ANY_LAYOUT_M,
}


def load(directory: Path) -> dict[tuple[str, int], Result]:
    """The latest result of each program and number of ranks.

    Raises:
        SystemExit: a file is none of the programs'.
    """
    latest: dict[tuple[str, int], Result] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            key = (result["benchmark"], result.get("world_size", 1))
            newer = key not in latest or result["date"] > latest[key]["date"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not a result of a benchmark program: {type(error).__name__}: {error}") from None
        if newer:
            latest[key] = {**result, "file": path.name}
    return dict(sorted(latest.items()))


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is aligned left, the others right."""
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def origin(result: Result) -> list[str]:
    """What a result was measured on, and when."""
    machine, versions = result["machine"], result["versions"]
    facts = [result.get("device", result.get("runtime", ""))]
    if result.get("nvidia_driver", "unknown") != "unknown":
        facts.append(f"kernel driver {result['nvidia_driver']}")
    facts += [f"{machine['cpu']}, {machine['cores']} cores", machine["system"]]
    facts += [f"{name} {version}" for name, version in (*versions.items(), *result.get("peers", {}).items())]
    if result.get("mpi"):
        facts.append(result["mpi"])
    lines = [f"Measured {result['date']} ([{result['file']}]({result['file']})): {'; '.join(facts)}."]
    if result.get("method"):
        lines.append(f"Method: {result['method']}.")
    if result.get("not_measured"):
        lines.append(f"Not measured, as the time was over: {', '.join(result['not_measured'])}.")
    return [*lines, ""]


def collective_table(result: Result, dtype: str) -> list[str]:
    """Times by size and contender, and bus bandwidth of the fastest."""
    rows = [row for row in result["results"] if row["type"] == dtype]
    names = list(dict.fromkeys((row["name"], row["ours"]) for row in rows))
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    times = {(row["size"], row["name"], row["ours"]): row for row in rows}
    lines = []
    for size in sizes:
        here = [times.get((size, *name)) for name in names]
        measured = [row for row in here if row and row["time_us"]]
        best = min(measured, key=lambda row: row["time_us"], default=None)
        cells = []
        for row in here:
            text = number(row["time_us"] if row else None)
            cells.append(f"**{text}**" if row is not None and row is best else text)
        lines.append([show_size(size), *cells, number(best["busbw_gbs"] if best else None, 1)])
    titles = ["size", *(f"{name} (ours)" if ours else name for name, ours in names), "busbw of the best, GB/s"]
    reasons = dict.fromkeys(f"{row['name']}: {row['reason']}" for row in rows if row["reason"])
    return [*table(titles, lines), *(f"- {reason}" for reason in reasons), *([""] if reasons else [])]


def types(result: Result) -> list[str]:
    """Element types of a collective's rows, in their order."""
    return list(dict.fromkeys(row["type"] for row in result["results"]))


def wrong_line(wrong: int) -> str:
    """Whether results were right."""
    return f"Wrong elements in all checks: {wrong}."


def all_reduce_section(result: Result) -> list[str]:
    """Tables of an all-reduce result."""
    lines = [f"## all_reduce on {result['world_size']} GPUs", "", *origin(result)]
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    for dtype in types(result):
        means = result["geometric_means"].get(dtype, {})
        lines += [
            f"### {dtype}: ours beside the best peer",
            "",
            f"Peer's time over ours, geometric mean: {number(means.get('peer_over_ours'))} with the best algorithm at "
            f"each size, {number(means.get('peer_over_auto'))} with the one that is chosen by itself. "
            f"Aim: {aims.ALL_REDUCE_RATIO}, and no size below 1.",
            "",
            *table(
                ["size", "auto, µs", "ours, µs", "by", "peer, µs", "by", "peer / auto", "peer / ours", "aim, µs"],
                [
                    [
                        show_size(row["size"]),
                        number(row["auto_us"]),
                        number(row["ours_us"]),
                        row["ours"],
                        number(row["peer_us"]),
                        row["peer"],
                        number(row["peer_over_auto"]),
                        number(row["peer_over_ours"]),
                        number(row["aim_us"]),
                    ]
                    for row in result["comparison"]
                    if row["type"] == dtype
                ],
            ),
            f"### {dtype}: all algorithms, µs",
            "",
            *collective_table(result, dtype),
        ]
    proxied = {row["size"]: row for row in result["results"] if row["name"] == "proxy" and row["type"] == "float32"}
    for size, key, aim, unit in (
        (aims.KIB, "time_us", f"under {aims.PROXIED_ALL_REDUCE_US:g}", "µs"),
        (256 * aims.MIB, "busbw_gbs", f"{aims.PROXIED_ALL_REDUCE_GBS:g}", "GB/s bus bandwidth"),
    ):
        if result["world_size"] == 4 and size in proxied:
            value = number(proxied[size][key], 1)
            lines += [f"By proxy alone, {show_size(size)}: {value} {unit}; aim {aim}.", ""]
    return lines


def all_to_all_section(result: Result) -> list[str]:
    """Tables of an all-to-all result."""
    lines = [f"## all_to_all on {result['world_size']} GPUs", "", *origin(result)]
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    for dtype in types(result):
        mean = number(result["geometric_means"].get(dtype))
        lines += [f"### {dtype}, µs; NCCL's time over the best of ours, geometric mean: {mean}", ""]
        lines += collective_table(result, dtype)
    return lines


def expert_parallel_section(result: Result) -> list[str]:
    """Table of MoE dispatch and combine."""
    rows = []
    for row in result["results"]:
        aim = aims.expert_parallel_us(result["world_size"], row["count"], row["name"]) if row["ours"] else None
        name = f"{row['name']} (ours)" if row["ours"] else row["name"]
        figures = (number(row["time_us"]), number(row["best_us"]), number(row["busbw_gbs"], 1), number(aim, 1))
        rows.append([str(row["count"]), name, *figures])
    return [
        f"## MoE dispatch and combine on {result['world_size']} GPUs",
        "",
        *origin(result),
        f"Hidden {result['hidden']}, top {result['topk']} of {result['experts']} experts, bfloat16. "
        + wrong_line(sum(row["wrong"] for row in result["results"])),
        "",
        *table(["tokens of a rank", "call", "median, µs", "best, µs", "over the link, GB/s", "aim, µs"], rows),
    ]


def launch_cost_section(result: Result) -> list[str]:
    """Table of CPU times."""
    return [
        f"## Launch cost on {result['world_size']} GPUs",
        "",
        *origin(result),
        f"CPU time to issue one call, µs. Aim: {result['aim_us']:g} where torch's add takes 4.9.",
        "",
        *table(
            ["call", "median", "best"],
            [[row["name"], number(row["median_us"]), number(row["best_us"])] for row in result["results"]],
        ),
    ]


def put_signal_section(result: Result) -> list[str]:
    """Tables of the channels."""
    latency = [
        [
            show_size(row["bytes"]) if row["bytes"] else "signal alone",
            *(number(row[key]) for key in ("one_way_us", "best_us", "mean_us", "limit_us", "aim_us")),
        ]
        for row in result["latency"]
    ]
    sm_latency = [
        [row["signal"], *(number(row[key]) for key in ("one_way_us", "best_us", "mean_us", "limit_us"))]
        for row in result["sm_latency"]
    ]
    bandwidth = [
        [show_size(row["bytes"]), row["direction"], *(number(row[k]) for k in ("gbs", "us_per_put", "limit_gbs"))]
        for row in result["bandwidth"]
    ]
    sm_bandwidth = [
        [str(row["blocks"]), row["operation"], number(row["gbs"], 1), number(row["limit_gbs"], 0)]
        for row in result["sm_bandwidth"]
    ]
    return [
        "## Channels between two GPUs",
        "",
        *origin(result),
        f"{wrong_line(result['wrong'])} Kernels time with a clock that steps by {result['clock_step_ns']} ns.",
        "",
        "### ProxyChannel: put with signal, one way, µs",
        "",
        *table(["size", "median", "best", "mean", "limit", "aim"], latency),
        "### SmChannel: signal, one way, µs",
        "",
        *table(["signal", "median", "best", "mean", "limit"], sm_latency),
        "### ProxyChannel: bandwidth of puts",
        "",
        *table(["size", "direction", "GB/s", "µs a put", "limit, GB/s"], bandwidth),
        "### SmChannel: bandwidth of copies",
        "",
        *table(["blocks", "operation", "GB/s", "limit, GB/s"], sm_bandwidth),
    ]


def ring_section(result: Result) -> list[str]:
    """Tables of the ring."""
    lines = ["## The trigger ring", "", *origin(result)]
    trip = result.get("round_trip")
    if trip:
        lines += [
            f"Push and sync of one thread: {number(trip['median_ns'] / 1e3)} µs "
            f"(best {number(trip['best_ns'] / 1e3)}); "
            f"the bare round trip in the same run: {number(trip['bare']['median_ns'] / 1e3)} µs "
            f"(best {number(trip['bare']['best_ns'] / 1e3)}; {aims.RING_ROUND_TRIP_US} when the aims were set). "
            f"Ratio {number(trip['over_bare'])}, aim {aims.RING_ROUND_TRIP_RATIO}.",
            "",
        ]
    if result.get("kernels"):
        lines += [
            "### Triggers that kernels push, millions a second",
            "",
            *table(
                ["slots", "producers", "engine", "best", "bare loop", "best", "aim"],
                [
                    [
                        str(row["fifo_size"]),
                        row["producers"],
                        *(
                            number(part[key] / 1e6)
                            for part in (row, row["bare"])
                            for key in ("median_per_s", "best_per_s")
                        ),
                        number(_RING_LAYOUT_AIMS.get(row["producers"]), 0),
                    ]
                    for row in result["kernels"]
                ],
            ),
        ]
    lines += [
        "### Drain rate beside a producing CPU thread, millions a second",
        "",
        *table(
            ["trigger", "median", "best", "of the bare loop"],
            [
                [
                    row["trigger"],
                    *(number(row[k] / 1e6) for k in ("median_per_s", "best_per_s")),
                    number(row["over_bare"]),
                ]
                for row in result["drain"]
            ],
        ),
    ]
    return lines


def rdma_writes_section(result: Result) -> list[str]:
    """Tables of the writes."""
    lines = ["## RDMA writes", "", *origin(result)]
    lines += [f"{result['note']}.", ""] if result["note"] else []
    lines += [f"Wrong bytes in all checks: {result['wrong']}.", ""]
    parts = (("rate", aims.RDMA_RATE_RATIO), ("bandwidth", aims.RDMA_BANDWIDTH_RATIO))
    for rows, aim in ((result[name], aim) for name, aim in parts):
        lines += [
            f"### Writes of {show_size(rows[0]['bytes'])}, {rows[0]['writes']} in each of {rows[0]['rounds']} rounds; "
            f"aim of the ratio {aim}",
            "",
            *table(
                ["writer", "median, 1/s", "best, 1/s", "median, MB/s", *(f"over {row['name']}" for row in rows)],
                [
                    [
                        f"{row['name']} (ours)" if row["ours"] else row["name"],
                        *(number(row[key], 0) for key in ("median_per_s", "best_per_s")),
                        number(row["median_gbs"] * 1e3),
                        *(number(ratio) for ratio in row["over"].values()),
                    ]
                    for row in rows
                ],
            ),
        ]
    return lines


SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "all_reduce": all_reduce_section,
    "all_to_all": all_to_all_section,
    "put_signal": put_signal_section,
    "ring": ring_section,
    "expert_parallel": expert_parallel_section,
    "launch_cost": launch_cost_section,
    "rdma_writes": rdma_writes_section,
}


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
    """Time and bus bandwidth by size, of float32 where it was measured."""
    name, ranks, dtype = result["benchmark"], result["world_size"], types(result)[0]
    rows = [row for row in result["results"] if row["type"] == dtype and row["time_us"]]
    files = []
    for key, unit, logarithmic in (("time_us", "time, µs", True), ("busbw_gbs", "bus bandwidth, GB/s", False)):
        figure, axes = _axes(f"{name}, {ranks} GPUs, {dtype}", "size", unit)
        for label, ours in dict.fromkeys((row["name"], row["ours"]) for row in rows):
            points = [(row["size"], row[key]) for row in rows if (row["name"], row["ours"]) == (label, ours)]
            style = "-" if ours else "--"
            axes.plot(*zip(*points, strict=True), style, marker="." if ours else "x", label=label)
        _by_size(axes, sorted({row["size"] for row in rows}))
        if logarithmic:
            axes.set_yscale("log")
        axes.legend(fontsize="small")
        files.append(f"{name}_{ranks}_{key.split('_')[0]}.svg")
        figure.savefig(directory / files[-1])
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
    figure.savefig(directory / "put_latency.svg")
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
    figure.savefig(directory / "sm_bandwidth.svg")
    return ["put_latency.svg", "sm_bandwidth.svg"]


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
    figure.savefig(directory / "ring_rates.svg")
    return ["ring_rates.svg"]


PLOTS: dict[str, Callable[[Result, Path], list[str]]] = {
    "all_reduce": _plot_collective,
    "all_to_all": _plot_collective,
    "put_signal": _plot_put_signal,
    "ring": _plot_ring,
}


def page(results: dict[tuple[str, int], Result], directory: Path) -> str:
    """The page's text; plots are written into the directory."""
    try:
        import matplotlib as mpl
    except ImportError:
        drawn = False
    else:
        drawn = True
        mpl.rcParams["svg.hashsalt"] = "proxyccl"  # the same results give the same file
    lines = [
        "# Results",
        "",
        "Made by `benchmarks/report.py` from the JSON files beside this page. Limits are what the machine allows, aims "
        "what is wanted; both were measured or set on H200 GPUs before (`benchmarks/aims.py`). The fastest is bold.",
        "",
    ]
    if not drawn:
        lines += ["Plots are missing: matplotlib was not installed when this page was made.", ""]
    for name, section in SECTIONS.items():
        for (benchmark, _), result in results.items():
            if benchmark != name:
                continue
            lines += section(result)
            if drawn and name in PLOTS:
                lines += [f"![{file.removesuffix('.svg')}]({file})" for file in PLOTS[name](result, directory)] + [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "directory", nargs="?", type=Path, default=RESULTS, help="default: results/ beside this program"
    )
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory} is no directory")
    results = load(directory)
    if not results:
        parser.error(f"no results (*.json) in {directory}")
    unknown = sorted({benchmark for benchmark, _ in results} - set(SECTIONS))
    if unknown:
        print(f"left out, as the page has no section for them: {', '.join(unknown)}", file=sys.stderr)
    path = directory / "README.md"
    path.write_text(page(results, directory))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
