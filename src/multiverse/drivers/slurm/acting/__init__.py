"""Changes Slurm: deletes nodes, writes comments, reads jobs just before a change, and keeps the gate closed."""
