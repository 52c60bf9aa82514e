"""Reads Slurm: tables of its commands become jobs, nodes, limits and users."""
