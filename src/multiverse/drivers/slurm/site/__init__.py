"""A site's configuration of Slurm: what slurm.conf says, what Multiverse needs of it, the files that a site adds, and
the configuration of guests."""
