"""The runtimes of GPUs: one for both vendors, and their differences."""
