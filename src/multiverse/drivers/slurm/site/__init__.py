"""A site's configuration of Slurm: what it says and lacks, the files that a site adds, and those of guests."""
