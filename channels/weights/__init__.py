"""Weights of a model: plans from one sharding to another, carried out by agents. See DESIGN.md."""
