"""The Python side of the engine's transports: a record for each transport (`transport.py`), listed in `table.py`."""
