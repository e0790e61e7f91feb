"""Execution plans: MSCCL++'s JSON programs of collectives."""
