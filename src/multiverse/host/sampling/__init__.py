"""Samples what this host and its VMs use, each second, and remembers an hour of it."""

from multiverse.host.sampling.sampler import Sampler

__all__ = ["Sampler"]
