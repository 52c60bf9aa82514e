"""The laboratory of Multiverse: a Slurm cluster on one machine, a simulation, benchmarks, a soak test and a demo."""
