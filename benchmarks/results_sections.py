"""The sections of the results page: each function takes a result and returns its tables and a one-sentence summary."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aims

from proxyccl.tools.options import show_size

Result = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        summary: its main result, for the table at the top of the page.
        lines: the text below the heading.
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
_MOVE_RATIOS = ("nccl_over_kernels", "nccl_over_proxy", "copy_engines_over_proxy")
_PING_PONG_CORES = 4
_OBSERVED_CORES = 3


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number for a table; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table; the first column is aligned left, the others right."""
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def on_gpus(result: Result) -> bool:
    """Returns whether kernels ran on GPUs; False if the CPU emulated them."""
    return bool(result["runtime"] != "host")


def place(result: Result) -> str:
    """Returns words that say in a heading where kernels ran."""
    ranks = result.get("world_size", 1)
    if ranks == 1:
        return "on a GPU" if on_gpus(result) else "on the host runtime"
    return f"on {ranks} GPUs" if on_gpus(result) else f"on {ranks} ranks of the host runtime"


def origin(result: Result) -> list[str]:
    """Returns lines that say on which machine, with which versions and when a result was measured."""
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
        text += f" Not measured, because the time was up: {', '.join(result['not_measured'])}."
    return [text, ""]


_OF_STEPS = {"late": "late", "cpu_ms": "CPU, ms"}
"""Columns of programs that others wrote: the fields of a value, and the columns' titles."""
_Ratios = dict[tuple[str, str], float]
"""Our value divided by the peer's, by program and variant."""
_LISTED_PROGRAMS = 8
"""The most programs whose ratios a summary lists one by one."""
_SLOWER = 1.03
"""The ratio of our time to another from which the page names a program."""


def _program_cells(row: Result, of_steps: Iterable[str]) -> list[list[str]]:
    ours = row["values"][0]["value"]
    digits = {"tokens/s": 0, "ms": 2}.get(row["unit"], 1)
    lines = []
    for value in row["values"]:
        ratio = value["value"] / ours if value["value"] and ours and value is not row["values"][0] else None
        share = "" if value["cpu_share"] is None else number(value["cpu_share"])
        name = f"{value['name']} (ours)" if value["ours"] else value["name"]
        titles = (row["program"], f"{row['figure']}, {row['unit']}") if not lines else ("", "")
        cells = [*titles, name, number(value["value"], digits), share, *(number(value[key]) for key in of_steps)]
        lines.append([*cells, "" if ratio is None else number(ratio)])
    return lines


def programs_section(result: Result) -> Section:
    """Returns the table of programs, each contender's line below ours."""
    rows = result["rows"]
    of_steps = {key: title for key, title in _OF_STEPS.items() if all(key in v for row in rows for v in row["values"])}
    lines = [
        *origin(result),
        *table(
            ["program", "figure", "by", "value", "CPU's share", *of_steps.values(), "value / ours"],
            [cells for row in rows for cells in _program_cells(row, of_steps)],
        ),
        *(f"- Not measured: {part}, {reason}." for part, reason in result["failed"].items()),
        *([""] if result["failed"] else []),
    ]
    ratios: dict[str, _Ratios] = {}
    peers = []
    slower = []
    for row in rows:
        peer = next((value for value in row["values"] if not value["ours"]), None)
        ours = row["values"][0]["value"]
        if peer and peer["value"] and ours:
            kind, _, variant = row["figure"].partition(", ")
            if kind not in ("a step", "training"):
                kind, variant = "", row["figure"]
            ratios.setdefault(kind, {})[row["program"], variant] = ours / peer["value"]
            peers.append(peer["name"].replace("nccl", "NCCL"))
        settings = [value["value"] for value in row["values"][1:] if value["ours"] and "late" in value]
        if settings and ours > _SLOWER * min(settings):
            over = number(ours / min(settings))
            slower.append(f"- {row['program']}: the defaults take {over} times as long as our fastest setting.")
    lines += [*slower, ""] if slower else []
    summary = _programs_summary(ratios, " or ".join(dict.fromkeys(peers)))
    return Section(f"{result.get('title', 'Programs')} {place(result)}", summary, lines)


def _programs_summary(ratios: dict[str, _Ratios], peer: str) -> str:
    """Returns the summary of programs, from our value divided by the peer's, by kind of figure and program."""
    steps, trainings = ratios.get("a step", {}), ratios.get("training", {})
    parts = []
    if len(steps) > _LISTED_PROGRAMS:
        values = steps.values()
        slower = {name: ratio for name, ratio in steps.items() if ratio > _SLOWER}
        parts.append(
            f"a step takes {number(min(values))} to {number(max(values))} of {peer}'s time (median of {len(steps)} "
            f"programs {number(statistics.median(values))}); programs with more than {_SLOWER:g}: "
            f"{_listed(slower) or 'none'}"
        )
    elif steps:
        parts.append(f"time of a step, divided by {peer}'s: {_listed(steps)}")
    if trainings:
        parts.append(f"tokens per second in training, divided by {peer}'s: {_listed(trainings)}")
    if not parts and ratios:
        parts.append(f"time, divided by {peer}'s: {_listed(ratios[''])}")
    return "; ".join(parts) or "without another library"


def _listed(ratios: _Ratios) -> str:
    """Returns each program with its ratios, by variant."""
    parts = []
    for program, rows in itertools.groupby(ratios.items(), key=lambda row: row[0][0]):
        values = [f"{variant} {number(ratio)}" if variant else number(ratio) for (_, variant), ratio in rows]
        parts.append(f"{program}: {', '.join(values)}")
    return "; ".join(parts)


def collective_table(result: Result, dtype: str) -> list[str]:
    """Returns a table of the times by size and contender, with the bus bandwidth of the fastest contender."""
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


def multiprocessors_table(rows: Sequence[Result]) -> list[str]:
    """Returns a table of how many multiprocessors each contender's kernels could occupy, over all sizes; no lines if no
    graph showed the number.
    """
    used: dict[str, list[int]] = {}
    for row in rows:
        if row.get("multiprocessors") is not None:
            used.setdefault(f"{row['name']} (ours)" if row["ours"] else row["name"], []).append(row["multiprocessors"])
    if not used:
        return []
    return [
        *table(
            ["call", "fewest multiprocessors, over all sizes", "most"],
            [[name, str(min(figures)), str(max(figures))] for name, figures in used.items()],
        ),
    ]


def types(result: Result) -> list[str]:
    """Returns the element types of a collective's rows, in order."""
    return list(dict.fromkeys(row["type"] for row in result["results"]))


def wrong_line(wrong: int) -> str:
    """Returns a sentence with the number of wrong elements."""
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
            f"The best peer's time, divided by ours, as the geometric mean over sizes: "
            f"{number(means.get('peer_over_auto'))} with *auto*, {number(means.get('peer_over_ours'))} with our best "
            f"algorithm at each size, and {number(means.get('peer_over_registered'))} with *registered*. The aim is "
            f"{aims.ALL_REDUCE_RATIO}, or {aims.REGISTERED_ALL_REDUCE_RATIO} for *registered* on 2 GPUs, and at least "
            "1 at each size. The link's limit is the time of copies of the same number of bytes in both directions at "
            "once; the aim for limit / registered is 0.92 from 16 MiB on, and 0.94 at 256 MiB. The last column is the "
            "best time of any library, including MSCCL++, when the aims were set.",
            "",
            *table(
                [
                    "size",
                    "auto, µs",
                    "ours, µs",
                    "by",
                    "peer, µs",
                    "by",
                    "peer / auto",
                    "peer / ours",
                    "registered, µs",
                    "peer / registered",
                    "link's limit / registered",
                    "registered by proxy, µs",
                    "peer / that",
                    "aim, µs",
                ],
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
                        number(row.get("registered_us")),
                        number(row.get("peer_over_registered")),
                        number(row.get("limit_over_registered")),
                        number(row.get("registered_proxy_us")),
                        number(row.get("peer_over_registered_proxy")),
                        number(row["aim_us"]),
                    ]
                    for row in result["comparison"]
                    if row["type"] == dtype
                ],
            ),
            f"### {dtype}: all algorithms, µs",
            "",
            *collective_table(result, dtype),
            *multiprocessors_table([row for row in result["results"] if row["type"] == dtype]),
        ]
    in_place = {row["size"]: row for row in result["comparison"] if row["type"] == "float32"}
    for size, aim in (
        (aims.KIB, f"at most {aims.PROXIED_PAIR_US:g} µs"),
        (256 * aims.MIB, "less than the best peer"),
    ):
        row = in_place.get(size, {})
        if result["world_size"] == 2 and row.get("registered_proxy_us"):
            lines += [
                f"By proxy with registered arrays, {show_size(size)}: {number(row['registered_proxy_us'])} µs, the "
                f"best peer {number(row['peer_us'])} µs; aim: {aim}.",
                "",
            ]
    proxied = {row["size"]: row for row in result["results"] if row["name"] == "proxy" and row["type"] == "float32"}
    for size, key, aim, unit in (
        (aims.KIB, "time_us", f"under {aims.PROXIED_ALL_REDUCE_US:g}", "µs"),
        (256 * aims.MIB, "busbw_gbs", f"{aims.PROXIED_ALL_REDUCE_GBS:g}", "GB/s bus bandwidth"),
    ):
        if result["world_size"] == 4 and size in proxied:
            value = number(proxied[size][key], 1)
            lines += [f"Algorithm `proxy`, {show_size(size)}: {value} {unit}; aim {aim}.", ""]
    means = [f"{number(mean.get('peer_over_auto'))} ({dtype})" for dtype, mean in result["geometric_means"].items()]
    ratios = [row["peer_over_auto"] for row in result["comparison"] if row["peer_over_auto"]]
    summary = (
        f"the best peer takes {' and '.join(means) or '-'} times our time, as the geometric mean over sizes (aim: at "
        f"least {aims.ALL_REDUCE_RATIO}); ours is slower in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} "
        "cases of size and type"
    )
    return Section(f"all_reduce {place(result)}", summary, lines)


def move_section(result: Result) -> Section:
    """Tables of an all_gather or all_to_all result."""
    name = result["benchmark"]
    compared = result.get("comparison", [])
    lines = origin(result)
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    for dtype in types(result):
        mean = number(result["geometric_means"].get(dtype))
        lines += [
            f"### {name}, {dtype}, µs",
            "",
            f"NCCL's time, divided by the time of our best algorithm, as the geometric mean over sizes: {mean}.",
            "",
        ]
        lines += collective_table(result, dtype)
        lines += multiprocessors_table([row for row in result["results"] if row["type"] == dtype])
        rows = [row for row in compared if row["type"] == dtype]
        if rows:
            lines += [
                "NCCL's times, divided by our times with registered arrays. The aims are at least "
                f"{aims.COPY_ENGINES_RATIO:g} for NCCL's copy engines / proxy from "
                f"{show_size(aims.COPY_ENGINES_BYTES)} on; at least 1 for NCCL / kernels; and for all_to_all a "
                f"geometric mean of {aims.MOVED_BY_KERNELS_RATIO:g} for NCCL / kernels.",
                "",
                *table(
                    ["size", "NCCL / kernels", "NCCL / proxy", "NCCL's copy engines / proxy"],
                    [[show_size(row["size"]), *(number(row[key]) for key in _MOVE_RATIOS)] for row in rows],
                ),
            ]
    means = [f"{number(mean)} ({dtype})" for dtype, mean in result["geometric_means"].items()]
    summary = f"NCCL takes {' and '.join(means) or '-'} times our time, as the geometric mean over sizes"
    engines = [
        row["copy_engines_over_proxy"]
        for row in compared
        if row["size"] >= aims.COPY_ENGINES_BYTES and row["copy_engines_over_proxy"]
    ]
    if engines:
        summary += (
            f"; from {show_size(aims.COPY_ENGINES_BYTES)} on, NCCL by copy engines takes at least "
            f"{number(min(engines))} times our time by proxy (aim: at least {aims.COPY_ENGINES_RATIO:g})"
        )
    return Section(f"{name} {place(result)}", summary, lines)


def overlap_section(result: Result) -> Section:
    """Tables of collectives beside a matrix product."""
    rows, side = result["results"], result["product_rows"]
    lines = [
        *origin(result),
        f"*beside*: the time of the collective while products of two matrices of {side} x {side} run on another "
        "stream, one after another. *product*: the time of one product while the collective runs again and again. The "
        f"aims by proxy: a collective takes at most {aims.BESIDE_RATIO:g} times as long as alone, and a product at "
        "most as long as beside NCCL's copy engines. " + wrong_line(sum(row["wrong"] for row in rows)),
        "",
    ]
    titles = ["size", "algorithm or peer", "multiprocessors used", "alone, µs", "beside, µs", "beside / alone"]
    titles += ["product, µs", "product / alone"]
    for collective in dict.fromkeys(row["collective"] for row in rows):
        of_it = [row for row in rows if row["collective"] == collective]
        alone = next((row["product_us"] for row in of_it if row["product_us"]), None)
        lines += [f"### {collective} beside products", "", f"A product alone takes {number(alone, 1)} µs.", ""]
        lines += table(
            titles,
            [
                [
                    show_size(row["size"]),
                    f"{row['name']} (ours)" if row["ours"] else row["name"],
                    number(row["multiprocessors"], 0),
                    *(number(row[key]) for key in ("alone_us", "beside_us", "beside_over_alone")),
                    number(row["product_beside_us"], 1),
                    number(row["product_over_alone"], 3),
                ]
                for row in of_it
            ],
        )
        reasons = dict.fromkeys(f"- {row['name']}: {row['reason']}" for row in of_it if row["reason"])
        lines += [*reasons, *([""] if reasons else [])]
    beside, product = (
        max((row[key] for row in result["comparison"] if row[key]), default=None)
        for key in ("beside_over_alone", "product_over_copy_engines")
    )
    summary = (
        f"a collective by proxy takes up to {number(beside)} times as long beside a matrix product as alone (aim: "
        f"at most {aims.BESIDE_RATIO:g}); the product takes up to {number(product)} times as long beside the "
        f"collective as beside NCCL's copy engines (aim: at most {aims.PRODUCT_RATIO:g})"
    )
    return Section(f"Collectives beside a matrix product {place(result)}", summary, lines)


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
        parts.append(
            f"{number(both, 0)} µs for {tokens} tokens per rank (NCCL moves the same bytes in {number(peer, 0)} µs)"
        )
    return f"dispatch and combine together take {' and '.join(parts)}"


def expert_parallel_section(result: Result) -> Section:
    """Returns the table of MoE dispatch and combine."""
    rows = []
    for row in result["results"]:
        aim = aims.expert_parallel_us(result["world_size"], row["count"], row["name"]) if row["ours"] else None
        name = f"{row['name']} (ours)" if row["ours"] else row["name"]
        figures = (number(row["time_us"]), number(row["best_us"]), number(row["busbw_gbs"], 1), number(aim, 1))
        rows.append([str(row["count"]), name, *figures])
    lines = [
        *origin(result),
        f"Hidden size {result['hidden']}, top {result['topk']} of {result['experts']} experts, bfloat16 unless a row "
        "says float8. A receiver gets one row for each token and expert; with *a row a rank* and *written once*, it "
        "gets one row for each token. *written once*: senders store rows directly into the output. *local*: combine "
        "first adds the rows of each rank's experts on that rank. *there*, *back*: NCCL's `all_to_all_single` moves "
        "the same bytes, without counting or ordering rows. "
        + wrong_line(sum(row["wrong"] for row in result["results"])),
        "",
        *table(["tokens per rank", "call", "median, µs", "best, µs", "over the link, GB/s", "aim, µs"], rows),
    ]
    return Section(f"MoE dispatch and combine {place(result)}", _moe_summary(result), lines)


def deep_ep_buffer_section(result: Result) -> Section:
    """Returns the table of DeepEP's normal mode."""
    columns = ("dispatch_us", "combine_us", "issuing_us")
    rows = [[str(row["tokens"]), row["name"], *(number(row[name], 1) for name in columns)] for row in result["results"]]
    of_tokens = {(row["tokens"], row["name"]): row for row in result["results"]}
    parts = [
        f"{number(row['dispatch_us'], 0)} µs for {tokens} tokens"
        f" (NCCL moves the bytes in {number(of_tokens[tokens, 'NCCL']['dispatch_us'], 0)} µs)"
        for (tokens, name), row in of_tokens.items()
        if name == "Buffer, num_worst_tokens"
    ]
    lines = [
        *origin(result),
        f"Hidden size {result['hidden']}, top {result['topk']} of {result['experts']} experts. "
        + wrong_line(sum(row["wrong"] for row in result["results"])),
        "",
        *table(["tokens per rank", "contender", "dispatch, µs", "combine, µs", "issuing both, µs"], rows),
    ]
    return Section(f"DeepEP's normal mode {place(result)}", f"a dispatch takes {', '.join(parts)}", lines)


def launch_cost_section(result: Result) -> Section:
    """Returns the table of CPU times."""
    medians = {row["name"]: number(row["median_us"], 1) for row in result["results"]}
    lines = [
        *origin(result),
        f"CPU time to issue one call, in µs. The aim is {result['aim_us']:g} µs on a machine where torch.add takes "
        "4.9 µs. The rows that begin with *of ours* are parts of the time of our call.",
        "",
        *table(
            ["call", "median", "best"],
            [[row["name"], number(row["median_us"]), number(row["best_us"])] for row in result["results"]],
        ),
    ]
    names = ("all_reduce, torch tensor", "torch.add, out given", "NCCL all_reduce")
    ours, add, nccl = (medians.get(name, "-") for name in names)
    summary = (
        f"the CPU issues our all_reduce in {ours} µs (aim: {result['aim_us']:g}), torch.add in {add} µs, and NCCL's "
        f"all_reduce in {nccl} µs"
    )
    return Section(f"Launch cost {place(result)}", summary, lines)


def decoder_section(result: Result) -> Section:
    """Returns the table of a decoder of an inference engine's layers."""
    name, key = {"vllm_decoder": ("vLLM", "vllm"), "sglang_decoder": ("SGLang", "sglang")}[result["benchmark"]]
    titles, steps = list(result["step_s"]), result["step_s"]
    batches = list(steps[titles[0]])
    facts = next(iter(result["contenders"].values()))
    rows = [[batch, *(number(1e3 * steps[title][batch], 3) for title in titles)] for batch in batches]
    others = [title for title in titles if not title.startswith("ProxyCCL")]
    fastest = {batch: min(steps[title][batch] for title in others) for batch in batches}
    ratios = ", ".join(
        f"{number(steps[titles[0]][batch] / fastest[batch])} for a batch of {batch}" for batch in batches
    )
    jobs = max(len(found[batches[0]]) for found in result["samples_s"].values())
    measured = "the median of one job" if jobs == 1 else f"the lowest of the medians of up to {jobs} jobs"
    lines = [
        *origin(result),
        f"Time of a step in ms, in {name}'s CUDA graphs: {measured}. {name} {facts[key]}, "
        f"{facts['device']}. *norms apart*: norms are not fused with their all_reduce.",
        "",
        *table(["sequences", *titles], rows),
    ]
    compared = f"that of {others[0]} communication" if len(others) == 1 else "the fastest of the others'"
    summary = f"time of a step, divided by {compared}: {ratios}"
    return Section(f"Decoder by {name} {place(result)}", summary, lines)


def triton_kernels_section(result: Result) -> Section:
    """Returns the table of kernels in Triton."""
    rows = [
        [
            row["what"],
            row["name"],
            number(row["time_us"]),
            number(row["best_us"]),
            number(row["ratio"], 3),
            number(row["aim"], 2),
        ]
        for row in result["results"]
    ]
    lines = [
        *origin(result),
        "The time of one call, from replays of a CUDA graph. *ratio*: the time, divided by the time in the first row "
        "with the same name. " + wrong_line(sum(row["wrong"] for row in result["results"])),
        "",
        *table(["what", "by", "median, µs", "best, µs", "ratio", "aim, at most"], rows),
    ]
    ratios = [
        f"{row['what']} {number(row['ratio'])}"
        for row in result["results"]
        if row["name"] in ("Triton", "Triton, overlapped")
    ]
    summary = (
        "time of the kernel in Triton, divided by the time of the kernel in C++ or, with a GEMM, of NCCL and "
        f"torch.matmul one after the other: {'; '.join(ratios)}"
    )
    return Section(f"Kernels in Triton {place(result)}", summary, lines)


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
        f"{wrong_line(result['wrong'])} The resolution of the kernels' clock is {result['clock_step_ns']} ns.",
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
    for rows, what in (("latency", "by the proxy"), ("sm_latency", "by a kernel's store")):
        if result[rows]:
            parts.append(f"a signal {what} takes {number(result[rows][0]['one_way_us'])} µs")
    for rows, what in (("bandwidth", "the proxy moves"), ("sm_bandwidth", "a kernel's loads and stores move")):
        if result[rows]:
            parts.append(f"{what} up to {number(max(row['gbs'] for row in result[rows]), 0)} GB/s")
    return Section(f"Channels {place(result)}", "; ".join(parts), lines)


def ring_section(result: Result) -> Section:
    """Tables of the ring."""
    lines, parts = origin(result), []
    trip = result.get("round_trip")
    if trip:
        lines += [
            f"One thread's push and sync take {number(trip['median_ns'] / 1e3)} µs "
            f"(best {number(trip['best_ns'] / 1e3)} µs). "
            f"A bare loop's round trip in the same run takes {number(trip['bare']['median_ns'] / 1e3)} µs "
            f"(best {number(trip['bare']['best_ns'] / 1e3)} µs; {aims.RING_ROUND_TRIP_US} µs when the aims were set). "
            f"The ratio is {number(trip['over_bare'])}, the aim {aims.RING_ROUND_TRIP_RATIO}.",
            "",
        ]
        ratio = number(trip["over_bare"])
        parts.append(
            f"one thread's push and sync take {number(trip['median_ns'] / 1e3)} µs, {ratio} times a bare loop's time"
        )
    idle = result.get("idle")
    if idle:
        short, long = (number(idle[f"wake_after_{ms}_ms"]["median_us"], 0) for ms in (1, 20))
        lines += [
            f"An idle proxy thread takes {number(idle['cpu'], 3)} of a core. The thread notices a push, as the median, "
            f"{short} µs after the push if it was idle for 1 ms, and {long} µs after the push if it was idle for "
            "20 ms.",
            "",
        ]
    if result.get("kernels"):
        fastest = max(row["median_per_s"] for row in result["kernels"])
        parts.append(f"kernels push up to {number(fastest / 1e6, 0)} million triggers a second")
        lines += [
            "### Triggers that kernels push, millions a second",
            "",
            *table(
                ["slots", "producers", "engine, median", "best", "bare loop, median", "best", "aim"],
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
        "### Triggers that the engine drains while a CPU thread pushes them, millions a second",
        "",
        *table(
            ["trigger", "median", "best", "median / bare loop"],
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
            f"proxied writes of {show_size(rows[0]['bytes'])} reach {number(best['over'][peer])} times the rate "
            f"of “{peer}” (aim: {aim})"
        )
    return Section("RDMA writes", "; ".join(parts), lines)


def _beside(
    rows: Iterable[Result], digits: int, scale: float, bound: str, elsewhere: str = "daemon"
) -> Iterable[list[str]]:
    """Yields rows that compare a proxy in its rank with a proxy in the daemon, or in a process of the job's own."""
    for row in rows:
        figures = (number(row[where] * scale, digits) for where in ("thread", elsewhere))
        yield [row["what"], *figures, number(row["ratio"]), f"{bound} {row['aim']:g}"]


def daemon_section(result: Result) -> Section:
    """Tables that compare proxies in the node daemon with proxies in their ranks."""
    ranks, cores = result["world_size"], result["cores"]
    titles = ("in the ranks", "in the daemon", "ratio", "aim")
    lines = [
        *origin(result),
        "The same work is measured with the proxies as threads of the ranks, and with the proxies in one "
        f"`proxyccl daemon` of {result['threads']} thread{'s' * (result['threads'] > 1)}. *ratio*: the figure with the "
        "daemon, divided by the figure with proxies in the ranks.",
        "",
        "### Latency, one way, µs",
        "",
        *table(["", *titles], _beside(result["latency_us"], 2, 1, "at most")),
    ]
    if not on_gpus(result) and result["machine"]["cores"] < _PING_PONG_CORES:
        lines += [
            f"A ping-pong of two kernels wants {_PING_PONG_CORES} cores here, for two kernels and two proxies. On "
            f"{result['machine']['cores']} cores, these rows mostly show how the operating system switches between "
            "processes. The last row needs only 2 cores.",
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
        f"with the daemon, latency is at most {number(latency)} times that with proxies in the ranks (aim: "
        f"{aims.DAEMON_LATENCY_RATIO:g}), and the rate of triggers at least {number(rate)} times (aim: "
        f"{aims.DAEMON_RATE_RATIO:g}); busy proxies take {number(busy['daemon'])} cores in the daemon, "
        f"{number(busy['thread'])} in the ranks"
    )
    return Section(f"The node daemon {place(result)}", summary, lines)


def proxy_place_section(result: Result) -> Section:
    """Tables that compare proxies in a process of the job with proxies in their ranks."""
    titles = ("in the ranks", "in their process", "ratio", "aim")
    start = result["start_ms"][0]
    lines = [
        *origin(result),
        "The same work is measured with the proxies as threads of the ranks, and with the proxies in a process that "
        "the job starts. *ratio*: the figure with the process, divided by the figure with proxies in the ranks.",
        "",
    ]
    for title, key, scale, bound in (
        ("Latency, one way, µs", "latency_us", 1.0, "at most"),
        ("Rate of one ring, millions of triggers a second", "triggers_per_s", 1e-6, "at least"),
        ("Time of the rank to issue a proxied call, µs", "issue_us", 1.0, "at most"),
    ):
        lines += [
            f"### Own process: {title}",
            "",
            *table(["", *titles], _beside(result[key], 2, scale, bound, "process")),
        ]
    lines += [
        f"The first use of a proxy takes {number(start['process'], 0)} ms where that starts the process, and "
        f"{number(start['thread'], 0)} ms where it starts a thread.",
        "",
    ]
    latency, issue = (max(row["ratio"] for row in result[key]) for key in ("latency_us", "issue_us"))
    rate = min(row["ratio"] for row in result["triggers_per_s"])
    summary = (
        f"with proxies in a process of the job's own, latency is at most {number(latency)} times and the time to issue "
        f"a call at most {number(issue)} times that with proxies in the ranks (aim: {aims.DAEMON_LATENCY_RATIO:g}), "
        f"and the rate of triggers at least {number(rate)} times (aim: {aims.DAEMON_RATE_RATIO:g})"
    )
    return Section(f"Proxies in a process of their own {place(result)}", summary, lines)


def after_a_rest_section(result: Result) -> Section:
    """Returns a table of one call after rests: by kernels, by proxy with each idle policy, and by NCCL."""
    rests = sorted(int(key.split("_")[1]) for key in result["rows"][0] if key.startswith("after_"))
    lines = [
        *origin(result),
        "The time in µs of one all_reduce of 1 KiB after all ranks have rested. A call wakes the proxy; a replay of a "
        "graph does not. *share of a core*: the CPU time that an idle proxy's thread takes.",
        "",
        *table(
            [
                "by",
                "issued",
                "place",
                "idle policy",
                *(f"after {rest} ms" for rest in rests),
                "issue",
                "share of a core",
            ],
            [
                [
                    *(row[key] for key in ("by", "issued", "place", "policy")),
                    *(number(row[f"after_{rest}_ms"], 1) for rest in rests),
                    number(row["issue_us"], 1),
                    number(row["share"]) if row.get("share") is not None else "",
                ]
                for row in result["rows"]
            ],
        ),
    ]
    longest = f"after_{rests[-1]}_ms"
    calls = [row for row in result["rows"] if row["issued"] == "call"]
    (kernels,) = (row[longest] for row in calls if row["by"] == "kernels")
    parts = [
        f"{number(row[longest], 0)} µs by proxy in a {row['place']}"
        for row in calls
        if row["by"] == "proxy" and row["policy"] == "default"
    ]
    summary = f"a call after {rests[-1]} ms of rest takes {number(kernels, 0)} µs by kernels, {', '.join(parts)}"
    return Section(f"Calls after a rest {place(result)}", summary, lines)


_FIRST_STAGES = ("interpreter", "imports", "communicator", "first result")
_FIRST_CALLS = ("first proxied call", "second proxied call")


def first_result_section(result: Result) -> Section:
    """Returns a table of the times from the start of a rank's process to its first results."""
    rows = result["stages_s"]
    proxied, over_nccl = result["proxied_at_2_s"], result.get("over_nccl")
    lines = [
        *origin(result),
        "Seconds from the start of the slowest rank's process until the program's first line runs, its imports are "
        "complete, its communicator is made, and the sum of an all_reduce of 1 KiB is on the CPU. The proxied calls "
        "are timed separately, in ms. Every job consists of new processes.",
        "",
        *table(
            ["", *(f"{stage}, s" for stage in _FIRST_STAGES), *(f"{call}, ms" for call in _FIRST_CALLS)],
            [
                [
                    title,
                    *(number(row[stage]) for stage in _FIRST_STAGES),
                    *(number(1e3 * row[call], 1) if call in row else "-" for call in _FIRST_CALLS),
                ]
                for title, row in rows.items()
            ],
        ),
    ]
    if "daemon_bytes_of_each_gpu" in result:
        taken = result["daemon_bytes_of_each_gpu"] / (1 << 20)
        lines += [f"The process of the job's proxies takes {number(taken, 0)} MiB of each GPU.", ""]
    summary = (
        f"a program has its first result {number(next(iter(rows.values()))['first result'])} s after its start; its "
        f"first proxied call, made when the communicator is 2 s old, takes {number(1e3 * proxied['value'], 0)} ms "
        f"(aim: at most {1e3 * proxied['aim']:.0f})"
    )
    if over_nccl is not None:
        summary += (
            f"; with torch, the first result takes {number(over_nccl['value'])} of NCCL's time (aim: at most "
            f"{over_nccl['aim']:g})"
        )
    return Section(f"From python to the first result {place(result)}", summary, lines)


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
    """Tables of the cost of observing and tracing a proxy."""
    lines = [
        *origin(result),
        "The same triggers are measured without an observer (*nobody looks*), while another process reads all counters "
        "every 10 ms (*looked at*), and while that process traces every trigger (*traced*). *rate*: triggers per "
        "second, divided by the rate without an observer. The aim for the traced rate is at least "
        f"{aims.TRACED_RATE:g}.",
        "",
    ]
    parts = []
    if result["engine_alone"]:
        lines += [
            "### The engine alone: least CPU time of a trigger, ns",
            "",
            "One thread fills a ring that fits its cache, and then drains the ring. So no memory latency hides the "
            "cost of an additional instruction.",
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
                f"{result['machine']['cores']} cores, the observer also takes CPU time from the kernel and the proxy.",
                "",
            ]
        parts.append(("kernels that push", result["kernels"]))
    least = []
    for what, rows in parts:
        rates = [number(min(row[mode]["rate_of_unobserved"] for row in rows)) for mode in _OBSERVED]
        least.append(f"{what}, {rates[0]} while its counters are read and {rates[1]} while it is traced")
    summary = f"lowest rate of triggers, divided by the rate without an observer: {'; '.join(least)}"
    return Section(f"The cost of being observed {place(result)}", summary, lines)


def host_collectives_section(result: Result) -> Section:
    """Tables that compare the host runtime's collectives with MPI's and, if gloo took part, with gloo's."""
    rows = result["results"]
    peers = [name for name in ("MPI", "gloo") if f"{name.lower()}_us" in rows[0]]
    between_hosts = result.get("hosts", 1) > 1
    aim, least = (
        (aims.BETWEEN_HOSTS_RATIO, 0) if between_hosts else (aims.HOST_ALL_REDUCE_RATIO, aims.HOST_ALL_REDUCE_BYTES)
    )
    ours = ("registered", "private")
    judged = ours if between_hosts else ours[:1]
    sizes = f"of {' and '.join(judged)} arrays {f'from {show_size(least)} on' if least else 'of any size'}"
    hosts = f" on {result['hosts']} hosts, network namespaces of one machine," if between_hosts else ""
    lines = [
        *origin(result),
        "*registered*: our calls with arrays of `Communicator.empty`. *private*: our calls with numpy arrays, which "
        f"the peers' calls also get. The aim for the peer's time / ours is at least {aim:g}, for all_reduce {sizes}. "
        f"{result['world_size']} ranks{hosts} shared {result['machine']['cores']} cores; the machine's load average "
        f"was {result['machine']['load']} at the end.{' ' + result['note'] if 'note' in result else ''}",
        "",
        wrong_line(sum(row["wrong"] for row in rows)),
        "",
    ]
    ratios = [(peer, own) for peer in peers for own in ours]
    titles = ["size", *(f"{name}, µs" for name in (*ours, *peers)), *(f"{peer} / {own}" for peer, own in ratios)]
    for collective in dict.fromkeys(row["collective"] for row in rows):
        lines += [f"### {collective} beside {' and '.join(peers)}", ""]
        lines += table(
            titles,
            [
                [
                    show_size(row["size"]),
                    *(number(row[f"{name.lower()}_us"], 1) for name in (*ours, *peers)),
                    *(number(row[f"{peer.lower()}_over_{own}"]) for peer, own in ratios),
                ]
                for row in rows
                if row["collective"] == collective
            ],
        )
    reductions = [row for row in rows if row["collective"] == "all_reduce" and row["size"] >= least]

    def lowest(peer: str) -> float | None:
        return min((row[f"{peer.lower()}_over_{own}"] for row in reductions for own in judged), default=None)

    reached = [f"{peer} takes at least {number(lowest(peer))} times our time" for peer in peers]
    summary = f"all_reduce {sizes}: {', '.join(reached)} (aim: {aim:g})"
    title = f"Collectives {'between hosts ' if between_hosts else ''}beside {' and '.join(peers)} {place(result)}"
    return Section(title, summary, lines)


def fabric_writes_section(result: Result) -> Section:
    """Returns a table of writes through libfabric, with other programs' results on the same interface."""
    beside, rows = result["beside"], result["rows"]
    others = []
    if "iperf3_bytes_per_second" in beside:
        others.append(f"iperf3's one stream of TCP carried {number(beside['iperf3_bytes_per_second'] / 1e6, 0)} MB/s")
    for row in rows:
        if (taken := beside.get(f"fi_pingpong_{row['bytes']}_us")) is not None:
            others.append(f"fi_pingpong took {number(taken, 1)} µs for {show_size(row['bytes'])} one way")
    lines = [*origin(result), *([f"On the same interface {'; '.join(others)}.", ""] if others else [])]
    lines += table(
        ["bytes of a write", "bare loop, 1/s", "proxied, 1/s", "proxied, MB/s", "proxied / bare", "aim"],
        [
            [
                show_size(row["bytes"]),
                number(row["bare_per_second"], 0),
                number(row["ours_per_second"], 0),
                number(row["ours_per_second"] * row["bytes"] / 1e6, 1),
                number(row["ratio"]),
                number(row["aim"]),
            ]
            for row in rows
        ],
    )
    lines += [wrong_line(result["wrong"]), ""]
    reached = ", ".join(f"{number(row['ratio'])} for {show_size(row['bytes'])} (aim {row['aim']:g})" for row in rows)
    return Section(
        "Writes through libfabric beside a bare loop",
        f"rate of proxied writes, divided by a bare loop's: {reached}",
        lines,
    )


def between_nodes_section(result: Result) -> Section:
    """Returns a table of calls between rehearsed nodes beside the peer's, with the limits of the network and
    the bus.
    """
    rows, limits = result["comparison"], result["limits"]
    ranks = result["world_size"] // result["nodes"]
    streams = ", ".join(
        f"{row['streams']}: {number(row['one_way_gbs'], 1)} and {number(row['each_of_both_ways_gbs'], 1)}"
        for row in limits["tcp"]
    )
    copies = ", ".join(number(limits[f"bus_{way}_gbs"], 1) for way in ("to_host", "to_device", "both"))
    lines = [
        *origin(result),
        f"{result['nodes']} groups of ranks on one machine act as nodes of {ranks} rank{'s' * (ranks > 1)} each. "
        "ProxyCCL stages data in pinned memory and sends it over TCP on the loopback; the peer may use only its "
        "sockets. Limits of the machine:",
        "",
        f"- TCP, in GB/s, by the number of streams, in one direction and in each of both directions: {streams};",
        f"- copies, in GB/s, to the host, to the device, and in each of both directions at once: {copies};",
        f"- 64 bytes by TCP, one way: {number(limits['tcp_short_us'], 1)} µs.",
        "",
    ]
    lines += table(
        ["call", "size", "ours, µs", "by", "peer, µs", "peer", "peer / ours"],
        [
            [
                row["collective"],
                show_size(row["size"]),
                number(row["ours_us"], 1),
                row["ours"],
                number(row["peer_us"], 1),
                row["peer"],
                number(row["peer_over_ours"]),
            ]
            for row in rows
        ],
    )
    experts = [row for row in result["results"] if row["call"] == "experts"]
    if experts:
        lines += table(
            ["experts", "tokens", "time, µs"],
            [[row["name"], str(row["count"]), number(row["time_us"], 1)] for row in experts],
        )
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    spans = {
        what: [row["peer_over_ours"] for row in rows if (row["size"] >= aims.MIB) is long]
        for what, long in (("below 1 MiB", False), ("from 1 MiB on", True))
    }
    reached = [
        f"{number(min(ratios))} to {number(max(ratios))} times our time {what}"
        for what, ratios in spans.items()
        if ratios
    ]
    return Section(
        f"Calls between rehearsed nodes {place(result)}",
        f"{' or '.join(dict.fromkeys(row['peer'] for row in rows))} takes {', and '.join(reached)} (aim: at least 1)",
        lines,
    )


def execution_plans_section(result: Result) -> Section:
    """Returns a table of the best execution plan of each size beside the library's two_shot."""
    rows = result["comparison"]
    lines = [
        *origin(result),
        "An execution plan carries out an all_reduce from one registered array to another. The plans belong to the "
        "benchmark; the table compares the fastest plan at each size with the library's algorithm `two_shot`. The aim "
        f"is at most {aims.PLAN_OVER_TWO_SHOT:g} times the time of `two_shot`.",
        "",
    ]
    lines += table(
        ["size", "type", "two_shot, µs", "best plan, µs", "plan", "plan / two_shot"],
        [
            [
                show_size(row["size"]),
                row["type"],
                number(row["two_shot_us"]),
                number(row["plan_us"]),
                row["plan"].removeprefix("plan, "),
                number(row["plan_over_two_shot"]),
            ]
            for row in rows
        ],
    )
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    worst = max((row["plan_over_two_shot"] for row in rows), default=None)
    summary = f"the best plan takes at most {number(worst)} times `two_shot`'s time (aim: {aims.PLAN_OVER_TWO_SHOT:g})"
    return Section(f"Execution plans beside two_shot {place(result)}", summary, lines)


def norms_section(result: Result) -> Section:
    """Returns a table of all_reduces with RMSNorm by number of rows, beside the all_reduce alone."""
    rows = result["comparison"]
    names = list(rows[0]["times_us"])
    lines = [
        *origin(result),
        f"Each rank has rows of {rows[0]['width']} values. Times are in µs. The aim for `{names[1]}` is at most "
        f"{aims.NORM_US:g} µs more than `{names[0]}` up to 128 rows, and at most {aims.NORM_OVER_ALONE:g} times the "
        f"time of `{names[0]}` with more rows.",
        "",
    ]
    lines += table(
        ["rows", *names, "one call / alone"],
        [
            [
                str(row["rows"]),
                *(number(row["times_us"][name]) for name in names),
                number(row["times_us"][names[1]] / row["times_us"][names[0]]),
            ]
            for row in rows
        ],
    )
    lines += [wrong_line(sum(row["wrong"] for row in result["results"])), ""]
    more = [row["times_us"][names[1]] - row["times_us"][names[0]] for row in rows if row["rows"] <= 128]
    summary = (
        f"one call takes at most {number(max(more, default=None))} µs more than an all_reduce alone up to 128 rows"
    )
    return Section(f"all_reduce with RMSNorm {place(result)}", f"{summary} (aim: {aims.NORM_US:g})", lines)


def regroup_section(result: Result) -> Section:
    """Returns a table of the ways to make a communicator of fewer ranks."""
    rows = {row["made_by"]: row for row in result["rows"]}
    lines = [
        *origin(result),
        "Each call makes a communicator of all ranks except the last. *abort* and *SHRINK_ABORT*: the call is made "
        "while an all_reduce waits for the last rank. The machine's load average was "
        f"{result['machine']['load']}. {result['nccl']}.",
        "",
    ]
    lines += table(
        ["made by", "until the call returns, ms", "until a first all_reduce has ended, ms"],
        [[name, number(row["call_ms"]), number(row["with_all_reduce_ms"])] for name, row in rows.items()],
    )
    lines += [wrong_line(result["wrong"]), ""]
    summary = f"a communicator of all ranks but one takes {number(rows['shrink']['call_ms'], 1)} ms by `shrink`, "
    summary += f"{number(rows['Communicator']['call_ms'], 1)} ms by `Communicator`"
    if "ncclCommShrink" in rows:
        summary += f", {number(rows['ncclCommShrink']['call_ms'], 1)} ms by `ncclCommShrink`"
    return Section(f"Communicators of fewer ranks, {place(result)}", summary, lines)


_TRANSFERRED = {"host": "the host's memory", "devices": "GPUs' memory", "mixed": "the host's and a GPU's memory"}


def transfers_section(result: Result) -> Section:
    """Returns a table of transfers, by size and number of blocks."""
    medians = result["medians"]
    ours, peer = medians["proxyccl"], medians.get("nixl", {})
    way = " by TCP" if result["tcp"] else ""
    lines = [
        *origin(result),
        f"Transfers are between two processes of one host{way}. Values are medians over {result['rounds']} runs of "
        "each library, which alternate. *post*: the time until the call that starts a transfer returns. In the "
        "last rows, the number is a number of regions of 4 KiB, and a time is the time for one region. *register*, "
        "*deregister*: one call for each region; *list*, *list backwards*: one call for all regions, in ascending or "
        "descending order of addresses. *metadata*: makes the bytes that another agent reads in *add*. *prepare*, "
        "*prepare remote*: prepares a list of blocks of this agent or of the other agent.",
        "",
    ]
    titles = ["operation, blocks x bytes", "ours, µs", "NIXL, µs", "NIXL / ours", "ours, GB/s", "NIXL, GB/s"]
    rows, ratios = [], []
    for case, values in ours.items():
        if case == "idle":
            continue
        other = peer.get(case, {})
        ratio = other["us"] / values["us"] if other else None
        ratios += [] if ratio is None else [ratio]
        rate, others_rate = (number(each.get("GB/s"), 1) for each in (values, other))
        posts = [number(each.get("post"), 1) for each in (values, other)]
        times = [number(each.get("us"), 1) for each in (values, other)]
        rows.append([case.lower(), *times, number(ratio), rate, others_rate, *posts])
    lines += table([*titles, "post, µs", "NIXL's post, µs"], rows)
    idle = [f"{name} {number(each['idle']['cores'])}" for name, each in medians.items()]
    lines += [f"Share of a core that a process with an idle agent takes: {', '.join(idle)}.", ""]
    summary = "without NIXL"
    if ratios:
        summary = f"NIXL takes {number(min(ratios))} to {number(max(ratios))} times our time; ours is slower in "
        summary += f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} operations"
    return Section(f"Transfers of {_TRANSFERRED[result['memory']]}{way}", summary, lines)


def weights_section(result: Result) -> Section:
    """Returns a table of the times to send a model's weights, by element types."""
    rows, tensors, extent = result["results"], result["tensors"], result["extent"]
    lines = [
        *origin(result),
        f"A trainer's rank sends {tensors} matrices of {extent} x {extent} elements into a sampler's parameters. "
        "*agents*: with `proxyccl.weights`, the sampler reads the trainer's elements and casts them to its own type. "
        f"*broadcast*: the trainer casts each tensor, and broadcasts the result by "
        f"{'NCCL' if on_gpus(result) else 'gloo'}.",
        "",
    ]
    lines += table(
        ["trainer's type", "sampler's type", "agents, ms", "broadcast, ms", "broadcast / agents"],
        [
            [
                row["from"],
                row["to"],
                number(row["agents_ms"], 1),
                number(row.get("broadcast_ms"), 1),
                number(row["broadcast_ms"] / row["agents_ms"] if "broadcast_ms" in row else None),
            ]
            for row in rows
        ],
    )
    ratios = [
        f"{number(row['broadcast_ms'] / row['agents_ms'])} ({row['to']})" for row in rows if row["from"] == row["to"]
    ]
    summary = f"without a cast, torch's broadcast takes {' and '.join(ratios)} times our time"
    return Section(f"Weights from a trainer to a sampler {place(result)}", summary, lines)


def group_memory_section(result: Result) -> Section:
    """Returns a table of the device memory after each step, and of the time to suspend and resume."""
    steps = result["steps"]
    lines = [
        *origin(result),
        "*device*: how much memory of the first GPU has been taken since its rank made a context, also by the proxies' "
        "process. *account*: the sum of `memory_usage()` of the step's communicator. Both include the arrays that the "
        "program allocated. *group 0*, *group 1*: our first and our second communicator; the second is "
        "suspendable. *NCCL 0*, *NCCL 1*: NCCL's communicators.",
        "",
    ]
    lines += table(
        ["step", "device, MiB", "account, MiB", "time, ms"],
        [
            [step["step"], number(step["device_mib"], 1), number(step["account_mib"], 1), number(step["ms"])]
            for step in steps
        ],
    )
    # For `resume`, this is the time of the last step, after suspend(save=False).
    ms = {step["step"]: step["ms"] for step in steps}
    summary = f"`suspend` takes {number(ms['suspend(save=False)'], 1)} ms, and `resume` {number(ms['resume'], 1)} ms, "
    summary += "if contents are not saved"
    device = {step["step"].partition(": all_reduce")[0]: step["device_mib"] for step in steps}  # after the last call
    if "NCCL 1" in device:
        made = next(step["device_mib"] for step in steps if step["step"].startswith("group 1: made"))
        ours, theirs = device["group 1"] - made, device["NCCL 1"] - device["NCCL 0"]
        summary += f"; a second communicator takes {number(ours, 0)} MiB, and NCCL's takes {number(theirs, 0)} MiB"
    return Section(f"Device memory of communicators {place(result)}", summary, lines)


def scale_section(result: Result) -> Section:
    """Returns a table of the resources that grow with the number of ranks: measured and fitted values."""
    rows, hosts = result["results"], result["kind"] == "hosts"
    apart = (
        "each of which acts as a separate host, with libfabric between the nodes"
        if hosts
        else "which share the host's memory"
    )
    lines = [
        *origin(result),
        f"Each rank is a process. The ranks form nodes of {rows[0]['node']} ranks, {apart}. Values are medians over "
        "ranks; times are those of the slowest rank. *fit*: the curve that is fitted to the row, for n ranks. *off "
        "by*: the largest error of the curve. All ranks share the machine's cores, so the curves of times have a term "
        "in n².",
        "",
    ]
    titles = ["of one rank", *(f"{row['ranks']} ranks" for row in rows), "fit", "off by"]
    shown = []
    for name, (title, factor, digits) in SCALE_QUANTITIES.items():
        fitted = result["fits"][name]
        a, *others = (factor * each for each in fitted["coefficients"])
        line = number(a, digits)
        for term, each in zip(fitted["terms"][1:], others, strict=True):
            if each:
                line += f" {'-' if each < 0 else '+'} {abs(each):.3g} {term}"
        values = [number(factor * row[name], digits) for row in rows]
        shown.append([title, *values, line, f"{fitted['worst_error']:.0%}"])
    lines += table(titles, shown)
    first, last = rows[0], rows[-1]
    summary = f"a communicator of {last['ranks']} ranks is made in {number(last['made_s'], 2)} s; a rank has "
    summary += f"{number(first['used: descriptors'], 0)} file descriptors open among {first['ranks']} ranks, "
    summary += f"{number(last['used: descriptors'], 0)} among {last['ranks']}"
    return Section(f"What grows with the number of ranks, {'hosts' if hosts else 'nodes of one host'}", summary, lines)


SCALE_QUANTITIES = {
    "made: descriptors": ("descriptors, communicator made", 1, 0),
    "used: descriptors": ("descriptors, after barrier and all_reduce", 1, 0),
    "used: sockets": ("sockets among them", 1, 0),
    "used: mappings": ("mappings", 1, 0),
    "used: threads": ("threads", 1, 0),
    "connections": ("connections of its proxy", 1, 0),
    "channels": ("channels of its proxy", 1, 0),
    "memory_ids": ("memory ids of its proxy", 1, 0),
    "used: private_kib": ("private memory, MiB", 1 / 1024, 1),
    "used: pss_kib": ("PSS, MiB", 1 / 1024, 1),
    "rest_cores": ("share of a core at rest, ‰", 1e3, 1),
    "exchanged_bytes": ("bytes received while joining, KiB", 1 / 1024, 0),
    "made_processor_s": ("processor time of joining, ms", 1e3, 1),
    "bootstrap_s": ("first exchange, ms", 1e3, 1),
    "exchange_s": ("further exchanges, ms", 1e3, 1),
    "segment_s": ("mapping of segments, ms", 1e3, 1),
    "connect_s": ("links, first exchange there, watcher, ms", 1e3, 1),
    "made_s": ("the communicator in all, ms", 1e3, 1),
    "round_s": ("a round of exchange, ms", 1e3, 2),
    "first_barrier_s": ("first barrier, with its links, ms", 1e3, 1),
    "barrier_s": ("barrier, ms", 1e3, 2),
    "all_reduce_s": ("all_reduce of 1 KiB, ms", 1e3, 2),
    "split_node_s": ("split into nodes, ms", 1e3, 1),
    "split_half_s": ("split into halves, ms", 1e3, 1),
    "close_s": ("close, ms", 1e3, 1),
}
"""The columns of the page for `scale.py`: by name, the title, the factor of the unit, and digits."""


SECTIONS: dict[str, Callable[[Result], Section]] = {
    "programs": programs_section,
    "all_reduce": all_reduce_section,
    "all_gather": move_section,
    "all_to_all": move_section,
    "overlap": overlap_section,
    "expert_parallel": expert_parallel_section,
    "deep_ep_buffer": deep_ep_buffer_section,
    "transfers": transfers_section,
    "weights": weights_section,
    "group_memory": group_memory_section,
    "launch_cost": launch_cost_section,
    "triton_kernels": triton_kernels_section,
    "execution_plans": execution_plans_section,
    "norms": norms_section,
    "vllm_decoder": decoder_section,
    "sglang_decoder": decoder_section,
    "put_signal": put_signal_section,
    "ring": ring_section,
    "daemon": daemon_section,
    "proxy_place": proxy_place_section,
    "after_a_rest": after_a_rest_section,
    "first_result": first_result_section,
    "observing": observing_section,
    "host_collectives": host_collectives_section,
    "between_hosts": host_collectives_section,
    "between_nodes": between_nodes_section,
    "rdma_writes": rdma_writes_section,
    "fabric_writes": fabric_writes_section,
    "regroup": regroup_section,
    "scale_nodes": scale_section,
    "scale_hosts": scale_section,
}
"""By program, in the page's order: first users' programs, then what a user calls, then the layers below."""
