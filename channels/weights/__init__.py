"""Transfers a model's weights from one sharding to another, by agents. See DESIGN.md."""
