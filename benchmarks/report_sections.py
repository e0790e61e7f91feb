"""The sections of the results page: each takes a result and gives its tables, with the sentence that sums them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aims

from proxyccl.channels.tools.options import show_size

Result = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        summary: what matters most in it, for the table at the top of the page.
        lines: what comes below the heading.
    """

    title: str
    summary: str
    lines: list[str]


_RING_LAYOUT_AIMS = {
    "1 block of 128": aims.RING_FULL_BLOCKS_M,
    "8 blocks of 256": aims.RING_FULL_BLOCKS_M,
    "8 blocks of 32": aims.RING_ANY_LAYOUT_M,
    "64 blocks of 1": aims.RING_ANY_LAYOUT_M,
    "512 blocks of 1": aims.RING_ANY_LAYOUT_M,
}
_PING_PONG_CORES = 4
_OBSERVED_CORES = 3


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is aligned left, the others right."""
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def on_gpus(result: Result) -> bool:
    """Whether kernels ran on GPUs, and not emulated by the CPU."""
    return bool(result["runtime"] != "host")


def place(result: Result) -> str:
    """Where kernels ran, for a heading."""
    ranks = result.get("world_size", 1)
    if ranks == 1:
        return "on a GPU" if on_gpus(result) else "on the host runtime"
    return f"on {ranks} GPUs" if on_gpus(result) else f"on {ranks} ranks of the host runtime"


def origin(result: Result) -> list[str]:
    """What a result was measured on, and when."""
    machine, versions = result["machine"], {**result["versions"], **result.get("peers", {})}
    facts: list[str] = [result.get("device", result["runtime"])]
    if result.get("nvidia_driver", "unknown") != "unknown":
        facts.append(f"kernel driver {result['nvidia_driver']}")
    facts += [f"{machine['cpu']}, {machine['cores']} cores", machine["system"]]
    facts += [f"{name} {version}" for name, version in versions.items()]
    if result.get("mpi"):
        facts.append(result["mpi"])
    text = f"Measured {result['date'][:10]} ([{result['file']}]({result['file']})): {'; '.join(facts)}."
    if result.get("method"):
        text += f" Method: {result['method']}."
    if result.get("not_measured"):
        text += f" Not measured, as the time was over: {', '.join(result['not_measured'])}."
    return [text, ""]


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


def all_reduce_section(result: Result) -> Section:
    """Tables of an all-reduce result."""
    lines = origin(result)
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    for dtype in types(result):
        means = result["geometric_means"].get(dtype, {})
        lines += [
            f"### {dtype}: ours beside the best peer",
            "",
            f"Peer's time over ours, geometric mean: {number(means.get('peer_over_ours'))} with the best algorithm at "
            f"each size, {number(means.get('peer_over_auto'))} with the one that is chosen by itself. "
            f"Aim: {aims.ALL_REDUCE_RATIO}, and no size below 1. The last column is the best time of any peer, MSCCL++ "
            "among them, when the aims were set.",
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
    means = [f"{number(mean.get('peer_over_auto'))} ({dtype})" for dtype, mean in result["geometric_means"].items()]
    ratios = [row["peer_over_auto"] for row in result["comparison"] if row["peer_over_auto"]]
    summary = (
        f"the best peer's time over ours: {', '.join(means)} in the geometric mean, aim {aims.ALL_REDUCE_RATIO}; "
        f"slower than the peer at {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} sizes"
    )
    return Section(f"all_reduce {place(result)}", summary, lines)


def all_to_all_section(result: Result) -> Section:
    """Tables of an all-to-all result."""
    lines = origin(result)
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    for dtype in types(result):
        mean = number(result["geometric_means"].get(dtype))
        lines += [f"### {dtype}, µs", "", f"NCCL's time over the best of ours, geometric mean: {mean}.", ""]
        lines += collective_table(result, dtype)
    means = [f"{number(mean)} ({dtype})" for dtype, mean in result["geometric_means"].items()]
    summary = f"NCCL's time over ours: {', '.join(means)} in the geometric mean"
    return Section(f"all_to_all {place(result)}", summary, lines)


def _moe_summary(result: Result) -> str:
    of_tokens: dict[int, list[Result]] = {}
    for row in result["results"]:
        if row["time_us"]:
            of_tokens.setdefault(row["count"], []).append(row)
    parts = []
    for tokens, rows in of_tokens.items():
        both = min((row["time_us"] for row in rows if row["ours"] and row["name"].startswith("both")), default=None)
        legs = [[row["time_us"] for row in rows if row["name"] == f"NCCL, {leg}"] for leg in ("there", "back")]
        peer = sum(map(min, legs)) if all(legs) else None
        parts.append(f"{tokens} tokens of a rank in {number(both, 0)} µs (NCCL moves the bytes in {number(peer, 0)})")
    return f"there and back: {', '.join(parts)}"


def expert_parallel_section(result: Result) -> Section:
    """Table of MoE dispatch and combine."""
    rows = []
    for row in result["results"]:
        aim = aims.expert_parallel_us(result["world_size"], row["count"], row["name"]) if row["ours"] else None
        name = f"{row['name']} (ours)" if row["ours"] else row["name"]
        figures = (number(row["time_us"]), number(row["best_us"]), number(row["busbw_gbs"], 1), number(aim, 1))
        rows.append([str(row["count"]), name, *figures])
    lines = [
        *origin(result),
        f"Hidden {result['hidden']}, top {result['topk']} of {result['experts']} experts, bfloat16. "
        + wrong_line(sum(row["wrong"] for row in result["results"])),
        "",
        *table(["tokens of a rank", "call", "median, µs", "best, µs", "over the link, GB/s", "aim, µs"], rows),
    ]
    return Section(f"MoE dispatch and combine {place(result)}", _moe_summary(result), lines)


def launch_cost_section(result: Result) -> Section:
    """Table of CPU times."""
    medians = {row["name"]: number(row["median_us"], 1) for row in result["results"]}
    lines = [
        *origin(result),
        f"CPU time to issue one call, µs. Aim: {result['aim_us']:g} where torch's add takes 4.9.",
        "",
        *table(
            ["call", "median", "best"],
            [[row["name"], number(row["median_us"]), number(row["best_us"])] for row in result["results"]],
        ),
    ]
    names = ("all_reduce, torch tensor", "torch.add, out given", "NCCL all_reduce")
    ours, add, nccl = (medians.get(name, "-") for name in names)
    summary = f"CPU time to issue an all_reduce: {ours} µs, aim {result['aim_us']:g} (torch.add {add}, NCCL {nccl})"
    return Section(f"Launch cost {place(result)}", summary, lines)


def put_signal_section(result: Result) -> Section:
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
    lines = [
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
    parts = []
    for rows, what in (("latency", "by proxy"), ("sm_latency", "from kernel to kernel")):
        if result[rows]:
            parts.append(
                f"{result[rows][0].get('signal', 'signal')} {what} in {number(result[rows][0]['one_way_us'])} µs"
            )
    for rows, what in (("bandwidth", "a proxy moves"), ("sm_bandwidth", "a kernel's own loads and stores")):
        if result[rows]:
            parts.append(f"{what} up to {number(max(row['gbs'] for row in result[rows]), 0)} GB/s")
    return Section(f"Channels {place(result)}", "; ".join(parts), lines)


def ring_section(result: Result) -> Section:
    """Tables of the ring."""
    lines, parts = origin(result), []
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
        ratio = number(trip["over_bare"])
        parts.append(f"push and sync in {number(trip['median_ns'] / 1e3)} µs, {ratio} of a bare loop's time")
    idle = result.get("idle")
    if idle:
        short, long = (number(idle[f"wake_after_{ms}_ms"]["median_us"], 0) for ms in (1, 20))
        lines += [
            f"With nothing to do the proxy's thread takes {number(idle['cpu'], 3)} cores. A push that comes after 1 ms "
            f"of that is taken {short} µs later in the median, one after 20 ms {long} µs later.",
            "",
        ]
    if result.get("kernels"):
        fastest = max(row["median_per_s"] for row in result["kernels"])
        parts.append(f"kernels push up to {number(fastest / 1e6, 0)} million triggers a second")
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
    return Section(f"The trigger ring {place(result)}", "; ".join(parts), lines)


def rdma_writes_section(result: Result) -> Section:
    """Tables of the writes."""
    lines, parts = origin(result), []
    lines += [f"{result['note']}.", ""] if result["note"] else []
    lines += [f"Wrong bytes in all checks: {result['wrong']}.", ""]
    measured = ((result["rate"], aims.RDMA_RATE_RATIO), (result["bandwidth"], aims.RDMA_BANDWIDTH_RATIO))
    for rows, aim in measured:
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
        peer, best = rows[0]["name"], max(rows, key=lambda row: row["ours"] * row["median_per_s"])
        parts.append(
            f"writes of {show_size(rows[0]['bytes'])}: {number(best['over'][peer])} of the rate of “{peer}”, aim {aim}"
        )
    return Section("RDMA writes", "; ".join(parts), lines)


def _beside(rows: Iterable[Result], digits: int, scale: float, bound: str) -> Iterable[list[str]]:
    """Rows of what a proxy does in its rank and in the daemon."""
    for row in rows:
        figures = (number(row[where] * scale, digits) for where in ("thread", "daemon"))
        yield [row["what"], *figures, number(row["ratio"]), f"{bound} {row['aim']:g}"]


def daemon_section(result: Result) -> Section:
    """Tables of proxies in the node daemon, beside the same in their ranks."""
    ranks, cores = result["world_size"], result["cores"]
    titles = ("in the ranks", "in the daemon", "ratio", "aim")
    lines = [
        *origin(result),
        "The same work with the proxies as threads of the ranks, and in one `proxyccl daemon` with "
        f"{result['threads']} thread{'s' * (result['threads'] > 1)}. A ratio is the daemon's figure over the ranks'.",
        "",
        "### Latency, one way, µs",
        "",
        *table(["", *titles], _beside(result["latency_us"], 2, 1, "at most")),
    ]
    if not on_gpus(result) and result["machine"]["cores"] < _PING_PONG_CORES:
        lines += [
            f"A ping-pong of two kernels wants {_PING_PONG_CORES} cores here, for both kernels and both proxies. With "
            f"{result['machine']['cores']} those rows show how the system hands a core over; the last row needs 2.",
            "",
        ]
    lines += [
        "### Rate of one ring, millions of triggers a second",
        "",
        *table(["", *titles], _beside(result["triggers_per_s"], 2, 1e-6, "at least")),
        f"### Cores that the proxies of {ranks} ranks take",
        "",
        *table(
            ["", *titles[:3]],
            [
                [
                    f"busy: {number(min(cores['triggers_per_s'].values()), 0)} puts with signals a second"
                    if name == "busy"
                    else name,
                    *(number(cores[name][where], 3) for where in ("thread", "daemon")),
                    number(cores[name]["daemon"] / cores[name]["thread"]),
                ]
                for name in ("idle", "busy")
            ],
        ),
    ]
    latency = max(row["ratio"] for row in result["latency_us"])
    rate = min(row["ratio"] for row in result["triggers_per_s"])
    busy = cores["busy"]
    summary = (
        f"the daemon over proxies in the ranks, at worst: latency {number(latency)} (aim: at most "
        f"{aims.DAEMON_LATENCY_RATIO:g}), rate {number(rate)} (aim: at least {aims.DAEMON_RATE_RATIO:g}); busy, it "
        f"takes {number(busy['daemon'])} cores and they {number(busy['thread'])}"
    )
    return Section(f"The node daemon {place(result)}", summary, lines)


_OBSERVED = ("looked at", "traced")


def _observed_table(rows: list[Result], names: Sequence[str], figure: str, scale: float) -> list[str]:
    return table(
        [*names, "nobody looks", *(title for mode in _OBSERVED for title in (mode, "rate"))],
        [
            [
                *(row[name] for name in names),
                number(row["nobody looks"][figure] * scale),
                *(
                    text
                    for mode in _OBSERVED
                    for text in (number(row[mode][figure] * scale), number(row[mode]["rate_of_unobserved"]))
                ),
            ]
            for row in rows
        ],
    )


def observing_section(result: Result) -> Section:
    """Tables of what it costs a proxy to be looked at and to be traced."""
    lines = [
        *origin(result),
        "The same triggers while nobody looks, while another process looks at all counters every 10 ms, and while it "
        "traces every trigger. A rate is that of triggers a second, over the one while nobody looks. Aim for a trace: "
        f"at least {aims.TRACED_RATE:g}.",
        "",
    ]
    parts = []
    if result["engine_alone"]:
        lines += [
            "### The engine alone, least ns of CPU time for a trigger",
            "",
            "A thread fills a ring that fits its cache, then drains it: nothing hides what an instruction more costs.",
            "",
            *_observed_table(result["engine_alone"], ["trigger"], "best", 1),
        ]
        parts.append(("the engine alone", result["engine_alone"]))
    if result["kernels"]:
        lines += [
            "### Triggers that kernels push, millions a second, medians",
            "",
            *_observed_table(result["kernels"], ["trigger", "producers"], "median", 1e-6),
        ]
        if not on_gpus(result) and result["machine"]["cores"] < _OBSERVED_CORES:
            lines += [
                f"The kernel, its proxy and the observer want {_OBSERVED_CORES} cores. With "
                f"{result['machine']['cores']} these rows show what the observer takes from the other two, too.",
                "",
            ]
        parts.append(("kernels that push", result["kernels"]))
    least = []
    for what, rows in parts:
        rates = [number(min(row[mode]["rate_of_unobserved"] for row in rows)) for mode in _OBSERVED]
        least.append(f"{what}, {rates[0]} {_OBSERVED[0]} and {rates[1]} {_OBSERVED[1]}")
    summary = f"the part of the rate that is left, in the worst case: {'; '.join(least)}"
    return Section(f"The cost of being observed {place(result)}", summary, lines)


SECTIONS: dict[str, Callable[[Result], Section]] = {
    "all_reduce": all_reduce_section,
    "all_to_all": all_to_all_section,
    "expert_parallel": expert_parallel_section,
    "launch_cost": launch_cost_section,
    "put_signal": put_signal_section,
    "ring": ring_section,
    "daemon": daemon_section,
    "observing": observing_section,
    "rdma_writes": rdma_writes_section,
}
"""By program, in the page's order: what a program calls first, then what lies below."""
