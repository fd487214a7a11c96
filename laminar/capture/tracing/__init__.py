"""One pass of tracing: what runs, whose line each op is, whose mistake an error is, and what no graph can hold."""
