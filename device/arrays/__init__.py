"""Arrays of device memory, and views of the arrays of other libraries."""
