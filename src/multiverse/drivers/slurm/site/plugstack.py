"""The line of plugstack.conf by which Slurm loads the plugin for VMs inside jobs (spank(7))."""

from __future__ import annotations

from multiverse.config import JobVmSettings

FILE = "multiverse-plugstack.conf"
"""Its file, beside slurm.conf, which the site's plugstack.conf includes."""


def loads_plugin(settings: JobVmSettings) -> bool:
    """Whether Slurm is to load the plugin on nodes with these settings."""
    return settings.enabled and settings.design == "plugin"


def plugstack(settings: JobVmSettings) -> str:
    """The text of the file. The plugin is optional: a required one that is missing, or was built for another release of
    Slurm, would break each launch of each user."""
    arguments = {
        "agent": settings.socket,
        "records": settings.records,
        "enter": settings.enter,
        "timeout": settings.timeout,
        "feature": settings.feature,
    }
    words = " ".join(f"{key}={value}" for key, value in arguments.items())
    return f"# VMs inside jobs: include this file in plugstack.conf on all nodes.\noptional {settings.plugin} {words}\n"
