"""What the user of a lab does in place of what an operator of a site is advised to do.

A lab has no services of systemd, and no settings that its user writes: `multiverse lab up` starts its services and is
given its settings. Advice is written for sites, and is translated where it is shown.
"""

from __future__ import annotations

import re
from pathlib import Path

_OPTIONS = {("host", "cores"): "--cores {}", ("host", "memory"): "--memory {}M"}  # of `lab up`, by section and key

_SETTING = re.compile(
    r"set (?P<key>\w+) = (?P<value>\"[^\"]*\"|[\w.]+)(?: or less)? in \[(?P<section>\w+)\]"
    r"(?:, or in (?:this|the) host's class)?"
)
_STATUS = re.compile(r"systemctl status multiverse[\w-]*")
_START = re.compile(r"systemctl [a-z -]*(?:start|reload|enable)[a-z -]* (?:multiverse[\w-]*|slurmctld)")
_LOG = re.compile(r"journalctl -u multiverse[\w-]*")


def lab_of(config: Path) -> Path | None:
    """The directory of the lab whose settings these are; None if they are a site's."""
    if not config.exists() or not config.read_text().startswith("# Written by `multiverse lab up`"):
        return None
    return config.parent.parent


def in_lab(lab: Path, advice: str) -> str:
    """The advice for the user of the lab in this directory."""
    command = f"multiverse lab up --dir {lab}"

    def setting(found: re.Match[str]) -> str:
        section, key, value = found["section"], found["key"], found["value"]
        option = _OPTIONS.get((section, key), f"--set {section}.{key}={{}}")
        return f"{command} {option.format(value)}"

    advice = _SETTING.sub(setting, advice)
    advice = _STATUS.sub(f"multiverse lab status --dir {lab}", advice)
    return _LOG.sub(f"{lab}/log", _START.sub(command, advice))
