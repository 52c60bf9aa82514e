"""What Slurm shows: the tables of its commands, and the jobs, nodes, limits and users that they become."""
