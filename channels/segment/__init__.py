"""The memory that the ranks of a host share: what each announces, its errors, its calls."""
