"""Multiverse: a virtual machine of its own for every HPC batch job."""

__version__ = "0.9.0"
