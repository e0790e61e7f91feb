"""Runs tests with an instrumented `proxyccl.proxy._transfers`. Arguments: the module's path, then pytest's
arguments.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

if __name__ == "__main__":
    del os.environ["LD_PRELOAD"]  # compilers must run without the sanitizer
    spec = importlib.util.spec_from_file_location("proxyccl.proxy._transfers", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["proxyccl.proxy._transfers"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.exit(pytest.main(sys.argv[2:]))
