"""Made by cffi from build_engine.py."""

from typing import Any

ffi: Any
lib: Any
