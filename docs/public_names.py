"""Lists public names, in Python and in kernels, that have no docstring or are on no page of the reference. Exits with
1 if it lists a name.

python public_names.py DOXYGEN_XML     DOXYGEN_XML: the folder of doxygen's output for the device headers
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import proxyccl

DEVICE_TYPES = (
    "ProxyChannelDeviceHandle",
    "SmChannelDeviceHandle",
    "Fifo",
    "DeviceSyncer",
    "DeviceSemaphore",
    "Semaphore",
)


def undocumented_in_python() -> Iterator[str]:
    for name in proxyccl.__all__:
        value = getattr(proxyccl, name)
        if not inspect.getdoc(value):
            yield f"proxyccl.{name}"
        for member, defined in vars(value).items() if inspect.isclass(value) else ():
            function = defined.fget if isinstance(defined, property) else getattr(defined, "__func__", defined)
            if not member.startswith("_") and callable(function) and not inspect.getdoc(function):
                yield f"proxyccl.{name}.{member}"


def undocumented_on_the_device(xml: Path) -> Iterator[str]:
    for name in DEVICE_TYPES:
        (compound,) = xml.glob(f"structproxyccl_1_1{name}.xml")
        for member in ElementTree.parse(compound).iterfind(".//sectiondef[@kind='public-func']/memberdef"):
            said = (_text(member.find(kind)) for kind in ("briefdescription", "detaileddescription"))
            if not any(said):
                yield f"proxyccl::{name}::{member.findtext('name')}"


def _text(element: ElementTree.Element | None) -> str:
    return "" if element is None else "".join(element.itertext()).strip()


def absent_from_the_reference() -> Iterator[str]:
    pages = sorted((Path(__file__).parent / "reference").glob("*.md"))
    text = "".join(page.read_text() for page in pages if not page.name.endswith(".rendered.md"))
    for name in proxyccl.__all__:
        if f"proxyccl.{name}\n" not in text and f"`{name}`" not in text:
            yield f"{name} is not in docs/reference"


if __name__ == "__main__":
    missing = [*undocumented_in_python(), *undocumented_on_the_device(Path(sys.argv[1])), *absent_from_the_reference()]
    print("\n".join(missing) or "every public name has a docstring and a place in the reference")
    sys.exit(bool(missing))
