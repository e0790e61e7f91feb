"""Makes the results page: python results_page.py [DIRECTORY]

The program reads every result in the directory, a JSON file of any name, and writes README.md and plots to the same
directory. If a program has several results of the same part with the same number of ranks and the same runtime, the
page shows the latest. Plots need matplotlib (the extra `bench`); without it the page has only its tables, and says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from results_plots import PLOTS
from results_sections import SECTIONS, Result, Section

RESULTS = Path(__file__).parent / "results"
_PARTS = ("title", "kind", "memory", "tcp")
"""The entries that tell apart results of one program with the same number of ranks and runtime."""
Key = tuple[str, int, str, tuple[str, ...]]
_INTRODUCTION = """\
# Results

This page shows what ProxyCCL's benchmarks measured, on which machine, and in comparison with which other libraries (the
*peers*). ProxyCCL and its peers alternate in one run. Compare ratios rather than times, because times depend on the
machine ([how it is measured](../README.md#how-it-is-measured)). `make bench-page` makes this page from the JSON files
in the same folder.

- *ours*: ProxyCCL. Entries without this mark are peers, or loops in C that do only the measured work (*bare loops*).
- *auto*: ProxyCCL chooses the algorithm. *registered*: the same, with arrays that all ranks have registered.
- *proxy*: the CPU thread that takes triggers out of a ring and moves data. The algorithm `proxy` moves all data by it.
- *limit*: the best that the machine allows, measured earlier on H200 GPUs. *aim*: our goal, set for these GPUs
  (`benchmarks/aims.py`).
- *busbw*: bus bandwidth as nccl-tests defines it: the rate of a link, which can be compared between numbers of ranks.
- *multiprocessors*: the number that a call occupies, which is the number of blocks of its largest kernel, or of the
  device's multiprocessors if that is smaller; 0 if only copy engines and the CPU move the data.
- *host runtime*: the CPU emulates the kernels. The ratios show how ring and proxy behave, but not how fast a GPU is.
- *rehearsed nodes*: groups of ranks on one machine that exchange data only as ranks of different nodes do.
- The fastest entry of a row is bold. `-` means not measured or not possible; a reason follows where one is known.

The tables of programs have these columns:

- *CPU's share*: the part of the time in which the CPU issued work. If it is near 1, a faster GPU does not make the
  program faster. For calls after a rest, this column has the share of a core that an idle proxy takes.
- *late*: the time of the slowest of steps 2 to 10, divided by the median. *CPU*: the CPU time of a step, including the
  CPU time of the proxies' process.
- *value / ours*: below 1 for a time, or above 1 for tokens per second, ProxyCCL with its defaults is slower.
- *by*: the library and its setting. *nothing*: a process group that does nothing. *default*, *zero*:
  `PROXYCCL_CTA_POLICY`. *unlent*: peers do not map memory of torch. *gather-by-proxy*, *scatter-by-proxy*: the proxies
  carry out long all_gathers or reduce_scatters.
"""


def load(directory: Path) -> dict[Key, Result]:
    """Returns the latest result of each program, number of ranks, runtime and part.

    Raises:
        SystemExit: a file is not a result of one of the programs.
    """
    latest: dict[Key, Result] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            program, runtime = result["benchmark"], result["runtime"]
            key = (program, result.get("world_size", 1), runtime, tuple(str(result.get(name, "")) for name in _PARTS))
            newer = key not in latest or result["date"] > latest[key]["date"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not a result of a benchmark program: {type(error).__name__}: {error}") from None
        if newer:
            latest[key] = {**result, "file": path.name}
    return dict(sorted(latest.items()))


def can_draw() -> bool:
    """Returns whether matplotlib is installed. Sets matplotlib up so that the same results give the same files."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.rcParams["svg.hashsalt"] = "proxyccl"
    return True


def anchor(title: str) -> str:
    """Returns the link to a heading, as GitHub forms it."""
    return "#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def contents(sections: Iterable[Section]) -> list[str]:
    """Returns the table at the top: each section with its summary."""
    return [
        "| benchmark | main result |",
        "|---|---|",
        *(f"| [{each.title}]({anchor(each.title)}) | {each.summary} |" for each in sections),
        "",
    ]


def page(results: dict[Key, Result], directory: Path) -> str:
    """Returns the page's text. Writes the plots into the directory."""
    drawn = can_draw()
    sections = []
    lines = []
    for name, section_of in SECTIONS.items():
        for (benchmark, *_), result in results.items():
            if benchmark != name:
                continue
            sections.append(section_of(result))
            lines += [f"## {sections[-1].title}", "", *sections[-1].lines]
            if drawn and name in PLOTS:
                lines += [f"![{file.removesuffix('.svg')}]({file})" for file in PLOTS[name](result, directory)] + [""]
    missing = [] if drawn else ["Plots are missing: matplotlib was not installed when this page was made.", ""]
    return "\n".join([_INTRODUCTION, *missing, *contents(sections), *lines]).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "directory", nargs="?", type=Path, default=RESULTS, help="default: results/ beside this program"
    )
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory} is not a directory")
    results = load(directory)
    if not results:
        parser.error(f"no results (*.json) in {directory}")
    unknown = sorted({benchmark for benchmark, *_ in results} - set(SECTIONS))
    if unknown:
        print(f"left out, because the page has no section for them: {', '.join(unknown)}", file=sys.stderr)
    path = directory / "README.md"
    path.write_text(page(results, directory))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
