"""Slurm: the scheduler's driver, and what a site installs for it (DESIGN 4)."""
