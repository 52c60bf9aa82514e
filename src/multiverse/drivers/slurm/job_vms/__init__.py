"""Slurm's side of VMs inside jobs: the feature of nodes that take such jobs, and what slurmctld says of a run."""
