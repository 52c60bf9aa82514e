"""HPCC across the hosts of a real lab: all figures are there. The values are not checked, because times vary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.bench import across
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.session import LabSession, session_environment
from tests.integration.conftest import new_lab
from tests.integration.images import slim

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]


def test_hpcc_runs_in_vms_of_two_hosts_and_of_one_and_on_plain_nodes(accelerator: Path) -> None:
    image = slim()
    wishes = LabOptions(hosts=2, physical=2, routed=True, cores=4, memory=8192)
    with new_lab(accelerator, wishes, controller=True) as lab, Client(lab.settings.socket) as client:
        plan = load(lab.where)
        assert plan is not None
        there = LabSession(lab.where, lab.settings, lab.user, Lab(lab.where, plan), session_environment(lab.where))
        found = across.run(there, client, 1, image.disk, lambda *_: None)
    assert set(found) == {across.TWO_HOSTS, across.ONE_HOST, across.PLAIN}
    for (sample,) in found.values():
        assert min(sample.latency, sample.ring_latency, sample.bandwidth, sample.hpl) > 0
