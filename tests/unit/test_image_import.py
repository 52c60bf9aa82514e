"""What importing a foreign system decides from what was found in it, and how it finds it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.errors import Refused
from multiverse.images import foreign
from multiverse.images.foreign import import_image, look, partitions
from multiverse.images.importing import (
    DRIVERS,
    ForeignSystem,
    family_of,
    fstab_of_image,
    installed_packages,
    kernel_options,
    offered_packages,
    os_facts,
    plan_import,
)

OPTIONS = frozenset({"HOTPLUG_CPU", "ACPI_HOTPLUG_CPU", "MEMORY_HOTPLUG", "ACPI_HOTPLUG_MEMORY"})
OFFERED = {"slurmd": "22.05.8-4", "slurm-client": "22.05.8-4", "munge": "0.5.15", "nfs-common": "1:2.6.2",
           "python3.11": "3.11.2"}  # fmt: skip
CLOUD = ForeignSystem(
    title="Debian GNU/Linux 12 (bookworm)",
    family="debian",
    kernel="6.1.0-18-cloud-amd64",
    drivers=frozenset({*DRIVERS, "nfsv4"}),
    config=OPTIONS,
    installed={"cloud-init": "22.4.2"},
    offered=OFFERED,
    pythons={"/usr/bin/python3": (3, 11)},
    units=frozenset({"cloud-init.service", "ssh.service", "cron.service"}),
    maker="mkinitramfs",
)


def lacks(system: ForeignSystem, **refuses: str) -> str:
    found = plan_import(system, lambda version: refuses.get("why", ""))
    assert all(lack.remedy for lack in found.lacking)
    return "; ".join(lack.what for lack in found.lacking)


def test_a_cloud_image_gets_what_a_node_needs_and_loses_what_works_against_the_agent() -> None:
    plan = plan_import(CLOUD)
    assert plan.lacking == ()
    assert plan.install == ("slurmd", "slurm-client", "munge", "nfs-common")
    assert plan.masked == ("cloud-init.service", "ssh.service")
    assert plan.abilities == ("fork", "plug_cpus", "plug_memory", "limit_disk")
    assert (plan.python, plan.first, plan.kernel_arguments, plan.notes) == ("/usr/bin/python3", "", (), ())


def test_what_is_there_is_not_installed() -> None:
    plan = plan_import(replace(CLOUD, installed=OFFERED))
    assert (plan.install, plan.lacking) == ((), ())


def test_rocky_gets_slurm_from_another_repository_and_a_newer_python_without_selinux() -> None:
    rocky = replace(CLOUD, title="Rocky Linux 9.4", family="redhat", installed={}, offered=None, selinux="enforcing",
                    pythons={"/usr/bin/python3": (3, 9)}, maker="dracut")  # fmt: skip
    plan = plan_import(rocky)
    assert plan.lacking == ()
    assert plan.first == "epel-release"
    assert plan.install == ("slurm-slurmd", "slurm", "munge", "nfs-utils", "python3.11")
    assert plan.python == "/usr/bin/python3.11"
    assert plan.kernel_arguments == ("selinux=0",) and "SELinux" in plan.notes[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architecture": "aarch64"}, "aarch64"),
        ({"has_systemd": False}, "systemd"),
        ({"kernel": ""}, "no kernel"),
        ({"drivers": frozenset({"virtio_pci", "virtio_blk", "virtio_net", "nfsv4"})}, "has no virtio_console"),
        ({"drivers": frozenset(DRIVERS)}, "has no nfsv4"),
        ({"maker": ""}, "initial ramdisk"),
        ({"offered": {"munge": "1", "nfs-common": "1"}}, "no slurmd, slurm-client"),
        ({"pythons": {"/usr/bin/python3": (3, 9)}, "offered": {k: v for k, v in OFFERED.items() if k != "python3.11"}},
         "no Python 3.11"),
        ({"family": "", "offered": None}, "neither apt nor dnf"),
    ],
)  # fmt: skip
def test_what_cannot_be_installed_is_said_with_its_remedy(changes: dict[str, object], what: str) -> None:
    assert what in lacks(replace(CLOUD, **changes))  # type: ignore[arg-type]


def test_a_slurmd_that_slurmctld_refuses_is_said_before_it_is_installed() -> None:
    assert "its slurmd is 22.05.8-4: too old" in lacks(CLOUD, why="too old")


def test_a_kernel_without_hotplug_lacks_abilities_and_one_that_does_not_tell_as_well() -> None:
    plan = plan_import(replace(CLOUD, config=OPTIONS - {"ACPI_HOTPLUG_MEMORY"}))
    assert plan.abilities == ("fork", "plug_cpus", "limit_disk") and "plug_memory" in plan.notes[0]
    plan = plan_import(replace(CLOUD, config=None))
    assert plan.abilities == ("fork", "limit_disk") and "unknown" in plan.notes[0]


def test_another_python_that_is_new_enough_runs_the_agent() -> None:
    pythons = {"/usr/bin/python3": (3, 10), "/usr/bin/python3.12": (3, 12)}
    plan = plan_import(replace(CLOUD, pythons=pythons, offered={}, installed=OFFERED))
    assert (plan.python, plan.lacking) == ("/usr/bin/python3.12", ())


# --- what is read ------------------------------------------------------------------------------------


def test_file_systems_on_partitions_are_dropped_and_those_on_the_network_kept() -> None:
    text = """\
# made by the installer
PARTUUID=aa / ext4 rw,x-systemd.growfs 0 1
UUID=bb /boot/efi vfat defaults 0 0
LABEL=swap none swap sw 0 0
server:/home /home nfs4 defaults 0 0
tmpfs /scratch tmpfs size=1g 0 0
"""
    assert fstab_of_image(text) == "server:/home /home nfs4 defaults 0 0\ntmpfs /scratch tmpfs size=1g 0 0\n"


def test_a_distribution_is_known_by_what_it_is_like() -> None:
    assert family_of(os_facts('ID=debian\nVERSION_ID="12"\n')) == "debian"
    assert family_of(os_facts("ID=linuxmint\nID_LIKE='ubuntu debian'\n")) == "debian"
    assert family_of(os_facts('ID="rocky"\nID_LIKE="rhel centos fedora"\n')) == "redhat"
    assert family_of(os_facts("ID=alpine\n")) == ""


def test_packages_that_are_installed_and_offered_are_read() -> None:
    status = (
        "Package: munge\nStatus: install ok installed\nVersion: 0.5\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    assert installed_packages(status) == {"munge": "0.5"}
    policy = (
        "slurmd:\n  Installed: (none)\n  Candidate: 22.05.8-4\n  Version table:\n     22.05.8-4 500\n"
        "munge:\n  Installed: (none)\n  Candidate: (none)\n"
    )
    assert offered_packages(policy) == {"slurmd": "22.05.8-4"}


def test_partitions_are_read_in_bytes() -> None:
    listed = 'START="262144" SIZE="3085958656"\nSTART="2048" SIZE="3145728"\n'
    assert partitions(listed) == [(262144 * 512, 3085958656), (2048 * 512, 3145728)]
    assert partitions("") == []


def test_options_of_a_kernel_count_as_modules_too() -> None:
    assert kernel_options("CONFIG_A=y\nCONFIG_B=m\n# CONFIG_C is not set\nCONFIG_D=n\n") == {"A", "B"}


def test_a_root_directory_is_looked_at_without_running_anything(tmp_path: Path) -> None:
    def put(name: str, text: str = "") -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    put("usr/lib/os-release", 'ID=debian\nPRETTY_NAME="Debian GNU/Linux 12"\n')
    for release in ("6.1.0-9-amd64", "6.1.0-18-amd64", "6.1.0-19-amd64"):
        put(f"boot/vmlinuz-{release}")
    for release in ("6.1.0-9-amd64", "6.1.0-18-amd64"):  # the newest kernel has no modules
        put(f"usr/lib/modules/{release}/modules.dep", "kernel/drivers/char/virtio_console.ko.xz: a/b.ko\n")
        put(f"usr/lib/modules/{release}/modules.builtin", "kernel/drivers/virtio/virtio-pci.ko\n")
    put("boot/config-6.1.0-18-amd64", "CONFIG_HOTPLUG_CPU=y\n")
    put("usr/lib/systemd/system/cron.service")
    put("usr/lib/systemd/system/serial-getty@.service")
    put("usr/sbin/mkinitramfs")
    put("usr/bin/python3.11")
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")
    (tmp_path / "usr/lib/systemd/systemd").write_bytes(b"\x7fELF".ljust(18, b"\0") + (62).to_bytes(2, "little"))
    put("var/lib/dpkg/status", "Package: munge\nStatus: install ok installed\nVersion: 0.5\n")
    found = look(tmp_path, {"slurmd": "22.05.8-4"})
    assert (found.title, found.family, found.architecture) == ("Debian GNU/Linux 12", "debian", "x86_64")
    assert found.kernel == "6.1.0-18-amd64"
    assert found.drivers == {"virtio_console", "virtio_pci"}
    assert found.config == {"HOTPLUG_CPU"}
    assert found.installed == {"munge": "0.5"} and found.slurmd == "22.05.8-4"
    assert found.pythons["/usr/bin/python3"] == (3, 11)
    assert found.units == {"cron.service", "serial-getty@.service", "serial-getty@ttyS0.service"}
    assert (found.maker, found.has_systemd, found.selinux) == ("mkinitramfs", True, "")


def test_what_a_visit_changes_in_the_system_is_put_back(tmp_path: Path) -> None:
    for place in ("etc/apt/apt.conf.d", "usr/sbin"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "etc/hosts").write_text("127.0.0.1 cloud\n")
    (tmp_path / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")  # which does not exist
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(KeyError), foreign._visiting(tmp_path):
        assert (tmp_path / "etc/resolv.conf").read_text() == Path("/etc/resolv.conf").read_text()
        assert (tmp_path / "usr/sbin/policy-rc.d").exists()
        raise KeyError
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "etc/resolv.conf").is_symlink() and (tmp_path / "etc/hosts").read_text() == "127.0.0.1 cloud\n"


def test_an_image_that_would_have_other_files_read_is_refused(tmp_path: Path) -> None:
    subprocess.run(("qemu-img", "create", "-q", "-f", "raw", tmp_path / "base.raw", "1M"), check=True)
    over = ("qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", tmp_path / "over.qcow2")
    subprocess.run(over, check=True)
    with pytest.raises(Refused, match=r"needs another file, base\.raw"):
        import_image(tmp_path / "over.qcow2", "over", tmp_path / "images", refuses=lambda version: "")
    with pytest.raises(Refused, match="no file"):
        import_image(tmp_path / "absent.qcow2", "absent", tmp_path / "images", refuses=lambda version: "")
    assert not (tmp_path / "images").exists()


def test_no_file_of_this_machine_is_written_through_a_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.write_text("127.0.0.1 this-machine\n")
    for place in ("etc/apt/apt.conf.d", "usr/sbin"):
        (root / place).mkdir(parents=True)
    (root / "etc/hosts").symlink_to(outside)
    with foreign._visiting(root):
        pass
    assert outside.read_text() == "127.0.0.1 this-machine\n"
