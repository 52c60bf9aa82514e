"""The evaluation of the Multiverse paper on the lab, scaled to the machine: the jobs, what runs in them, the runs, and
the report."""
