"""What operators see of requests: a line in the log, counts, traces."""
