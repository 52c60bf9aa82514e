"""Slurm, as a scheduler."""
