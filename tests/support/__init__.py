"""Support for the tests: ranks, daemons, fake devices, oracles, and programs that tests start."""
