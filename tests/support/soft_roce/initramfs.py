"""Makes an initramfs, the kernel's initial file system, as an archive (cpio, "newc").

The kernel's Documentation/driver-api/early-userspace/buffer-format.rst describes the format.
"""

from __future__ import annotations

import stat

TRAILER = "TRAILER!!!"


class Initramfs:
    """An archive of directories and files, whose names have no leading slash."""

    def __init__(self) -> None:
        self._archive = bytearray()
        self._entries = 0

    def directory(self, name: str) -> None:
        self._add(name, stat.S_IFDIR | 0o755)

    def file(self, name: str, contents: bytes, *, executable: bool = False) -> None:
        self._add(name, stat.S_IFREG | (0o755 if executable else 0o644), contents)

    def console(self) -> None:
        """Adds /dev/console, the input and output of the first process."""
        self._add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))

    def finish(self) -> bytes:
        """Completes the archive and returns it."""
        self._add(TRAILER, 0)
        return bytes(self._archive)

    def _add(self, name: str, mode: int, contents: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._entries += 1
        encoded = name.encode() + b"\0"
        fields = {
            "inode": self._entries,
            "mode": mode,
            "uid": 0,
            "gid": 0,
            "links": 1,
            "mtime": 0,
            "bytes": len(contents),
            "major": 0,
            "minor": 0,
            "device_major": device[0],
            "device_minor": device[1],
            "name_bytes": len(encoded),
            "checksum": 0,
        }
        header = "070701" + "".join(f"{field:08X}" for field in fields.values())
        for part in (header.encode() + encoded, contents):
            self._archive += part + bytes(-(len(self._archive) + len(part)) % 4)
