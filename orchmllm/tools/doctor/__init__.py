"""Whether this machine, or all machines of a job, can run a recipe."""
