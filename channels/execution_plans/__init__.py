"""Execution plans: collectives as MSCCL++'s JSON programs."""
