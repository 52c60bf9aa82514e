"""What a site installs: files beside its slurm.conf and for systemd, rendered, written and checked."""
