"""The Python side of the engine's transports: one record for each (`transport.py`), all of them in `table.py`."""
