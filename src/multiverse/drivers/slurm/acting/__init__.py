"""What is changed in Slurm beside jobs that are let through: nodes are deleted, comments written, the gate is kept."""
