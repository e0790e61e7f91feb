"""Whether ranks live: who watches them, and the end of a communicator when one is lost."""
