"""The engine's transports for Python: a record for each transport (`transport.py`), listed in `table.py`."""
