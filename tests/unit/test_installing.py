"""`multiverse site install` and `remove`: which lines are added to the site's own files, and that all is taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multiverse.bundles.slurm import scheduler
from multiverse.cli import site as cli
from multiverse.cli.commands import build
from multiverse.config import HostClass, HostSettings, JobVmSettings, QemuSettings, Settings, SlurmSettings
from multiverse.core.errors import Refused, Unknown
from multiverse.drivers.slurm.site import conf, install, requirements
from multiverse.drivers.slurm.site.requirements import Level, Version
from multiverse.ports.site import Addition, InstallationPlan
from multiverse.site import checking, installing, rendering
from multiverse.system import blocks, files

# Without anything that Multiverse needs, but for what only a change of a line would give.
SLURM_CONF = """\
ClusterName=prod
SlurmctldHost=head(192.0.2.1)
SlurmUser=root
SelectType=select/cons_tres
NodeName=DEFAULT CPUs=64 \\
  RealMemory=256000
NodeName=n[1-9] NodeAddr=192.0.2.[11-19]
PartitionName=batch Nodes=n[1-9] Default=YES"""
JOB_SUBMIT = """\
function slurm_job_submit(job, partitions, uid)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""
RELEASE = Version(22, 5)
CONFIG = Path("/etc/multiverse/multiverse.toml")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A site of a Slurm that knows nothing of Multiverse. What is for systemd goes below the test's directory, too."""
    etc = tmp_path / "slurm"
    etc.mkdir()
    (etc / "slurm.conf").write_text(SLURM_CONF)
    monkeypatch.setattr(rendering, "SYSTEMD", tmp_path / "systemd")
    monkeypatch.setattr(rendering, "TMPFILES", tmp_path / "tmpfiles.d")
    packaged = {tmp_path / "systemd": tmp_path / "lib/systemd", tmp_path / "tmpfiles.d": tmp_path / "lib/tmpfiles.d"}
    monkeypatch.setattr(rendering, "PACKAGED", packaged)
    monkeypatch.setattr(checking, "release_of", lambda _: RELEASE)
    monkeypatch.setattr(scheduler.checking, "release_of", lambda _: RELEASE)
    slurm = SlurmSettings(conf=etc / "slurm.conf", inbox=Path("/run/multiverse/inbox"))
    qemu = QemuSettings(images=tmp_path / "images", vms=tmp_path / "vms")
    return Settings(slurm=slurm, host=HostSettings(cores=48), qemu=qemu, socket=tmp_path / "api.sock")


def tree(top: Path) -> dict[Path, tuple[str, int]]:
    """All files below with text and mode."""
    return {path: (path.read_text(), path.stat().st_mode) for path in sorted(top.rglob("*")) if path.is_file()}


def installed(settings: Settings) -> InstallationPlan:
    plan = installing.plan(settings, CONFIG, RELEASE)
    assert not plan.by_hand
    list(rendering.write(plan.files, Path("/")))
    for addition in plan.additions:
        installing.add(addition)
    return plan


def removed(settings: Settings) -> dict[str, str]:
    """What was said of each file."""
    return {each.path.name: installing.take_back(each) for each in installing.removals(settings, CONFIG)}


def test_the_lines_are_what_the_check_asks_for_and_nothing_is_missing_then(settings: Settings) -> None:
    plan = installed(settings)
    (addition,) = plan.additions
    assert addition.lines == (
        *("Include multiverse.conf", "MaxNodeCount=512", "TreeWidth=65533", "JobSubmitPlugins=lua"),
        f"EpilogSlurmctld={settings.slurm.conf.parent}/multiverse-epilog",
        "CommunicationParameters=keepalivetime=300,keepaliveinterval=10,keepaliveprobes=6",
        "SchedulerParameters=bf_continue,bf_yield_interval=100000,partition_job_depth=50",
    )
    text = settings.slurm.conf.read_text()
    assert text.index("Include multiverse.conf") < text.index("NodeName=DEFAULT")
    assert blocks.without(text) == SLURM_CONF + "\n"
    assert list(requirements.examine(settings, conf.read(settings.slurm.conf), RELEASE)) == []
    assert installing.original(settings.slurm.conf).read_text() == SLURM_CONF


def test_limits_of_the_settings_are_on_our_partitions_line_and_stay_when_the_site_is_installed_again(
    settings: Settings,
) -> None:
    limits = "MaxTime=2-0 DefaultTime=1:00:00 AllowGroups=staff,guests"
    ours = settings.slurm.conf.with_name("multiverse.conf")
    changed = replace(settings, slurm=replace(settings.slurm, limits=limits))
    installed(settings)
    assert "MaxTime=INFINITE State=UP" in ours.read_text()
    for _ in range(2):
        plan = installing.plan(changed, CONFIG, RELEASE)
        assert plan.by_hand == () and plan.additions == ()
        list(rendering.write(plan.files, Path("/")))
        assert set(limits.split()) <= set(ours.read_text().split()) and "INFINITE" not in ours.read_text()
    wrong = replace(settings, slurm=replace(settings.slurm, limits="Nodes=n1"))
    with pytest.raises(Refused, match="Nodes is no limit"):
        installing.plan(wrong, CONFIG, RELEASE)


def test_a_second_installation_changes_nothing_and_removal_leaves_what_was_there(
    settings: Settings, tmp_path: Path
) -> None:
    (settings.slurm.conf.parent / "job_submit.lua").write_text(JOB_SUBMIT)
    settings.slurm.conf.chmod(0o640)
    before = tree(tmp_path)
    installed(settings)
    after = tree(tmp_path)
    assert len(after) > len(before) + 6
    again = installing.plan(settings, CONFIG, RELEASE)
    assert again.additions == () and again.by_hand == ()
    assert {what for _, what in rendering.write(again.files, Path("/"))} == {rendering.WriteOutcome.UNCHANGED}
    assert tree(tmp_path) == after
    assert set(removed(settings).values()) == {""}
    assert tree(tmp_path) == before


def test_more_hosts_change_our_own_line(settings: Settings) -> None:
    installed(settings)
    larger = replace(settings, host=HostSettings(cores=480))
    (addition,) = installed(larger).additions
    assert "MaxNodeCount=1280" in addition.lines
    text = settings.slurm.conf.read_text()
    assert text.count("MaxNodeCount=") == 1 and installing.original(settings.slurm.conf).read_text() == SLURM_CONF


def test_the_sites_rules_and_its_epilog_get_lines_at_their_places(settings: Settings, tmp_path: Path) -> None:
    submit, epilog = settings.slurm.conf.with_name("job_submit.lua"), tmp_path / "epilog"
    submit.write_text(JOB_SUBMIT)
    epilog.write_text("#!/bin/sh\nlogger over\nexit 0\n")
    epilog.chmod(0o755)
    settings.slurm.conf.write_text(SLURM_CONF + f"\nEpilogSlurmctld={epilog}\n")
    installed(settings)
    lines = submit.read_text().splitlines()
    assert lines[-1] == "return slurm.SUCCESS" and install.HOOK in "\n".join(lines[4:7])
    shell = epilog.read_text().splitlines()
    assert shell[0] == "#!/bin/sh" and f"{settings.slurm.conf.parent}/multiverse-epilog || true" in shell[1:4]
    assert epilog.stat().st_mode & 0o777 == 0o755
    assert set(removed(settings).values()) == {""}
    assert (submit.read_text(), epilog.read_text()) == (JOB_SUBMIT, "#!/bin/sh\nlogger over\nexit 0\n")


def test_an_epilog_that_is_no_shell_script_is_left(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "epilog").write_text("#!/usr/bin/python3\nprint()\n")
    settings.slurm.conf.write_text(SLURM_CONF + f"\nEpilogSlurmctld={tmp_path}/epilog\n")
    plan = installing.plan(settings, CONFIG, RELEASE)
    assert [each.name for each in plan.left] == [f"{tmp_path}/epilog"]


def test_the_plugin_gets_a_line_in_a_plugstack_that_is_made_for_it(settings: Settings) -> None:
    plugstack = settings.slurm.conf.with_name("plugstack.conf")
    settings = replace(settings, job_vms=JobVmSettings(enabled=True))
    (_, addition) = installed(settings).additions
    assert addition == Addition(plugstack, (f"include {plugstack.with_name('multiverse-plugstack.conf')}",), 0)
    removed(settings)
    assert not plugstack.exists()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("MaxNodeCount=64", "MaxNodeCount"),
        ("JobSubmitPlugins=throttle", "JobSubmitPlugins"),
        ("Licenses=matlab:2", "Licenses"),
        ("PartitionName=all Nodes=ALL", "PartitionName=all"),
        ("AuthType=auth/none", "AuthType"),
    ],
)
def test_where_a_line_of_the_sites_has_to_change_it_is_left_to_the_administrator(
    settings: Settings, line: str, name: str
) -> None:
    settings.slurm.conf.write_text(f"{SLURM_CONF}\n{line}\n")
    plan = installing.plan(settings, CONFIG, RELEASE)
    assert [(each.level, each.name) for each in plan.by_hand] == [(Level.PROBLEM, name)]


def test_parameters_of_the_sites_own_are_no_obstacle_where_ours_are_only_advised(settings: Settings) -> None:
    settings.slurm.conf.write_text(f"{SLURM_CONF}\nSchedulerParameters=bf_window=100\n")
    plan = installing.plan(settings, CONFIG, RELEASE)
    assert not plan.by_hand and {each.name for each in plan.left} == {"SchedulerParameters"}
    assert "SchedulerParameters" not in "".join(plan.additions[0].lines)


def test_defaults_in_a_file_that_is_included_are_below_our_lines(settings: Settings) -> None:
    settings.slurm.conf.with_name("nodes.conf").write_text("NodeName=DEFAULT CPUs=4\nNodeName=m[1-3]\n")
    settings.slurm.conf.write_text("ClusterName=a\nSlurmUser=root\nSelectType=select/cons_tres\nInclude nodes.conf\n")
    assert installing.plan(settings, CONFIG, RELEASE).additions[0].at == 3


def test_what_was_changed_since_is_named_and_kept(settings: Settings) -> None:
    installed(settings)
    text = settings.slurm.conf.read_text()
    settings.slurm.conf.write_text(text + "# of the site, later\n")
    gate = settings.slurm.conf.with_name("multiverse.lua")
    gate.write_text(gate.read_text() + "-- mine\n")
    said = removed(settings)
    assert (
        said["slurm.conf"].startswith("only our lines were taken out")
        and said["multiverse.lua"] == "it was changed here"
    )
    assert {name for name, what in said.items() if what} == {"slurm.conf", "multiverse.lua"}
    assert settings.slurm.conf.read_text() == f"{SLURM_CONF}\n# of the site, later\n" and gate.exists()
    assert installing.original(settings.slurm.conf).read_text() == SLURM_CONF


def test_lines_of_ours_that_were_changed_are_neither_replaced_nor_removed(settings: Settings) -> None:
    installed(settings)
    text = settings.slurm.conf.read_text().replace("MaxNodeCount=512", "MaxNodeCount=9999")
    settings.slurm.conf.write_text(text)
    (finding,) = installing.plan(settings, CONFIG, RELEASE).by_hand
    assert finding.name == str(settings.slurm.conf) and "changed here" in finding.message
    with pytest.raises(Refused, match=r"includes multiverse\.conf by a line that was added by hand"):
        installing.removals(settings, CONFIG)
    assert settings.slurm.conf.read_text() == text


def test_a_unit_that_a_package_has_is_not_written_again(settings: Settings, tmp_path: Path) -> None:
    names = {file.path.name for file in installing.plan(settings, CONFIG, RELEASE).files}
    assert {rendering.SERVICE, rendering.AGENT_SERVICE, rendering.BRIDGE_SERVICE} <= names
    for path, text in rendering.packaged().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    packaged = {path.name for path in rendering.packaged()}
    assert packaged == {rendering.SERVICE, rendering.AGENT_SERVICE, "multiverse-agent.conf"}
    after = {file.path.name for file in installing.plan(settings, CONFIG, RELEASE).files}
    assert names - after == packaged - {"multiverse-agent.conf"}
    other = {file.path.name for file in installing.plan(settings, tmp_path / "other.toml", RELEASE).files}
    assert other == names, "the package's is for the usual settings"


def test_blocks_are_told_from_what_is_around_them() -> None:
    text = blocks.added("a\nb", ["x=1", "y=2"], 1)
    assert text.splitlines()[0] == "a" and text.splitlines()[-1] == "b" and blocks.lines_of(text) == ["x=1", "y=2"]
    assert blocks.without(text) == "a\nb\n" and not blocks.is_changed(text)
    assert blocks.is_changed(text.replace("x=1", "x=2")) and blocks.is_changed(text.rpartition("b\n")[0][:-5])
    assert blocks.without(text.replace("x=1", "x=2")) == text.replace("x=1", "x=2")
    assert not blocks.is_changed("a\n") and blocks.without("a\n") == "a\n" and blocks.lines_of("a\n") == []
    assert files.origin(text) is not files.Origin.RENDERED


# --- what is still used -----------------------------------------------------------------------------


class FakeSlurm:
    """Answers as Slurm's commands do."""

    def __init__(self, jobs: str = "", reservations: str = "") -> None:
        self.jobs, self.reservations, self.deleted = jobs, reservations, list[str]()

    async def run(self, program: str, *words: str) -> str:
        if program == "squeue":
            return self.jobs
        if words[0] == "delete":
            self.deleted.append(words[1])
            return ""
        return self.reservations


def test_jobs_vms_and_reservations_are_still_used(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(
        "7\n8_[1-9]\n",
        "ReservationName=mvgate PartitionName=vm Licenses=vm:1 \n"
        "ReservationName=class PartitionName=vm Licenses=(null) \n"
        "ReservationName=other PartitionName=batch Licenses=(null) \n",
    )
    monkeypatch.setattr(installing, "SlurmCommands", lambda _: slurm)
    (settings.qemu.vms / "mvab-1").mkdir(parents=True)
    assert installing.in_use(settings) == [
        "2 jobs in partition vm: 7, 8_[1-9]",
        "reservation class, which is of partition vm or holds its licence",
        "1 VM: mvab-1",
    ]
    assert installing.stop(settings) == [] and slurm.deleted == ["ReservationName=mvgate"]
    (settings.qemu.vms / "mvab-1").rmdir()
    monkeypatch.setattr(installing, "SlurmCommands", lambda _: FakeSlurm())
    assert installing.in_use(settings) == []


def test_a_slurm_that_does_not_answer_counts_as_used(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        async def run(self, *_: str) -> str:
            raise Unknown("slurmctld is away")

    monkeypatch.setattr(installing, "SlurmCommands", lambda _: Away())
    assert installing.in_use(settings) == ["Slurm cannot be asked what is used: slurmctld is away"]


# --- the commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 140])
def test_the_commands_show_each_line_and_ask(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(cli, "load", lambda _: settings)
    monkeypatch.setattr(cli.output.console, "_width", columns)
    monkeypatch.setattr(installing, "SlurmCommands", lambda _: FakeSlurm())
    monkeypatch.setattr(installing.subprocess, "run", lambda *_, **__: None)
    before = tree(tmp_path)
    app = build(["site"])
    said = CliRunner().invoke(app, ["site", "install"], input="n\n")
    assert said.exit_code == 1 and tree(tmp_path) == before
    assert f"{settings.slurm.conf}, above line 5\n  + Include multiverse.conf\n" in said.output
    said = CliRunner().invoke(app, ["site", "install", "--yes"])
    assert said.exit_code == 0 and "systemctl restart slurmctld" in said.output, said.output
    assert "systemctl enable --now multiverse-agent multiverse\n" in said.output
    assert "  + Include" not in CliRunner().invoke(app, ["site", "install", "--yes"]).output
    monkeypatch.setattr(installing, "SlurmCommands", lambda _: FakeSlurm("9\n"))
    used = CliRunner().invoke(app, ["site", "remove", "--yes"])
    assert isinstance(used.exception, Refused) and "still used  1 job in partition vm: 9" in used.output
    assert tree(tmp_path) != before
    monkeypatch.setattr(installing, "SlurmCommands", lambda _: FakeSlurm())
    said = CliRunner().invoke(app, ["site", "remove", "--yes"])
    assert said.exit_code == 0 and "  - Include multiverse.conf" in said.output
    assert tree(tmp_path) == before


def test_on_a_controller_that_is_no_host_no_agent_is_to_be_started(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "load", lambda _: replace(settings, hosts=(HostClass("elsewhere"),)))
    said = CliRunner().invoke(build(["site"]), ["site", "install", "--yes"])
    assert "systemctl enable --now multiverse\n" in said.output and "agent" not in said.output


def test_nothing_is_written_where_a_line_has_to_change(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.slurm.conf.write_text(f"{SLURM_CONF}\nLicenses=matlab:2\n")
    monkeypatch.setattr(cli, "load", lambda _: settings)
    before = tree(tmp_path)
    said = CliRunner().invoke(build(["site"]), ["site", "install", "--yes"])
    assert isinstance(said.exception, Refused) and "set Licenses=matlab:2,vm:1" in said.output
    assert tree(tmp_path) == before
