"""What runs in worker processes: one module per way to call. Each function returns the Sample of its window."""
