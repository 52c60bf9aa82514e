"""Physical nodes as hosts: the pilot jobs that lease them."""
