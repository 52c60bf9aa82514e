"""Jobs with VMs inside on control groups of version 2 alone: tests of this machine, run again on an emulated one that
has no others. Its VMs are emulated by an emulated machine, so it copies their template from here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse_lab.lab.service import PATIENCE
from tests.integration import iommu_guest
from tests.integration.conftest import TEMPLATES, new_lab, nodes_with_job_vms
from tests.integration.images import CACHE, slim
from tests.integration.job_nodes import job_nodes
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SLOWER = 10
"""How many times longer than here the emulated machine may take for everything."""
TESTS = "control_groups or version_2 or memory_of_its_job or killed_slurmstepd or killed_slurmd"


@pytest.fixture
def files(accelerator: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the image, and with a template of it that a lab of this machine has built."""
    image = slim()
    with tempfile.TemporaryDirectory(prefix="files-", dir=CACHE) as place:
        top = Path(place)
        top.chmod(0o755)
        templates = top / "templates"
        monkeypatch.setenv(TEMPLATES, str(templates))
        with new_lab(accelerator, nodes_with_job_vms(1), controller=False) as lab:
            job_nodes(lab)[0].begin()
            until("the template is offered", lambda: list(templates.glob("slim@*")), 60)
        copied = top / "test/images" / image.path.name
        copied.mkdir(parents=True)
        for file in image.path.iterdir():
            (copied / file.name).hardlink_to(file)
        yield top


@pytest.mark.timeout(3600)
def test_jobs_have_vms_in_their_control_groups_of_version_2_and_leave_nothing(files: Path, tmp_path: Path) -> None:
    inside, top = iommu_guest.FILES, Path(__file__).parents[2]
    variables = {
        PATIENCE: str(SLOWER),
        TEMPLATES: inside / "templates",
        "MULTIVERSE_TEST_CACHE": inside / "test",
        "PATH": f"{iommu_guest.python().parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{top}:{top}/src",
        "HOME": "/root",
    }
    given = (f"{name}={value}" for name, value in variables.items())
    command = ["env", f"--chdir={top}", *given, "pytest", "-x", "-v", "--color=no", "-p", "no:cacheprovider",
               "--timeout=0", "tests/integration/test_job_ends.py", "-k", TESTS]  # fmt: skip
    said = iommu_guest.run(slim(), tmp_path, command, memory=6144, limit=3400, files=files)
    assert re.search(r"\b6 passed\b", said), said[-6000:]
