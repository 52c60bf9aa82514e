"""The soak test: jobs of all kinds on a full lab for hours, while every component is killed, and a verdict on each job.

`kinds` says which jobs and incidents there are, and what an incident may do to a job. `plan` draws them from a seed.
`workload` submits the jobs, `incidents` strikes the components, `judge` compares what each job wrote with what Slurm
and the controller say. `leftovers` looks for what remains. `run` puts them together.
"""
