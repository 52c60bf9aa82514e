"""The driver of Slurm, and the files that a site installs for it."""
