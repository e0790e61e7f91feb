"""Marks for tests of transports that a build of the engine may lack."""

from __future__ import annotations

import pytest

from proxyccl.proxy._engine import lib

needs_fabric = pytest.mark.skipif(not lib.proxyccl_fabric_built(), reason="this build has no fabric transport")
needs_verbs = pytest.mark.skipif(not lib.proxyccl_verbs_built(), reason="this build has no verbs transport")
