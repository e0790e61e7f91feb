"""Made by cffi from build_native.py."""

from typing import Any

ffi: Any
lib: Any
