from __future__ import annotations

from support.agents import mapped, pair

__all__ = ["mapped", "pair"]
