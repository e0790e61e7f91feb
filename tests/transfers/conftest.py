"""Settings for the tests of agents."""

from __future__ import annotations

from support.agents import pair

__all__ = ["pair"]
