"""Jobs with VMs inside, as they are submitted: by options of the plugin or by words of the comment."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from multiverse.agent.job_protocol import PROTOCOL, PlainRequest, parse
from multiverse.agent.job_protocol import answer as answer_of_agent
from multiverse.config import JobVmSettings, Settings, SlurmSettings
from multiverse.drivers.slurm.job_vms import TEST
from multiverse.drivers.slurm.site.install import plugstack
from tests.unit.plugin_harness import SPANK, build, needs_plugin
from tests.unit.slurm_lua import PARTITIONS, install_scripts, modify, needs_lua, run, submit, submit_each

OPTION = "spank_job_env = { [0] = '_SLURM_SPANK_OPTION_multiverse_vm_image=slim' }"
NOTE = "the tasks of this job run in a VM, on a node with the feature job-vms"


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    return Settings(slurm=SlurmSettings(conf=tmp_path / "slurm.conf", inbox=tmp_path / "inbox"))


@needs_lua
@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (f"partition = 'other', {OPTION}", "|0|job-vms|"),
        ("partition = 'other', comment = 'vm:image=slim,vcpu=2'", f"{NOTE}|0|job-vms|"),
        ("partition = 'other', comment = 'vm:image=slim', features = 'job-vms'", "|0|job-vms|"),
        (f"partition = 'other', {OPTION}, features = 'a,b'", "|0|a,b&job-vms|"),
        (f"partition = 'other', {OPTION}, features = 'a|b'", "|0|(a|b)&job-vms|"),
        (f"partition = 'other', {OPTION}, features = '(a|b)&c'", "|0|(a|b)&c&job-vms|"),
        (f"partition = 'other', {OPTION}, features = '(a&b)|c'", "write (a|b)&c|2036|"),
        (f"partition = 'other', {OPTION}, features = 'a*2'", "counts and brackets in --constraint are not supported"),
        (f"partition = 'other', {OPTION}, features = '[a|b]'", "counts and brackets in --constraint are not supported"),
        ("partition = 'other', comment = 'vm:imgae=slim'", "vm:imgae=slim in --comment is not supported"),
        ("partition = 'other', comment = 'vm:net=1G'", "or submit to partition vm|2036|"),
        ("partition = 'other', comment = 'vm:image=../x'", "vm:image=../x in --comment is wrong: give the name of"),
        ("partition = 'other', comment = 'vm:ivshmem=32'", f"{NOTE}|0|job-vms|"),
        (
            "partition = 'other', comment = 'vm:ivshmem=33'",
            "vm:ivshmem=33 in --comment is wrong: give a number of regions",
        ),
        (
            "partition = 'other', comment = 'vm:ivshmem=abc'",
            "is wrong: give a number of regions of shared memory, from 1 to",
        ),
        (
            "partition = 'other', comment = 'vm:vcpu=0'",
            "vm:vcpu=0 in --comment is wrong: give a number of virtual CPUs",
        ),
        ("partition = 'other', comment = 'vm:memory=1X'", "vm:memory=1X in --comment is wrong: give a size in MiB"),
        ("partition = 'other', comment = 'vm:disk=1 vm:disk=1'", "vm:disk is given twice in --comment"),
        (
            f"partition = 'other', comment = 'vm:disk=1', {OPTION}",
            "by options and by vm: in --comment: use one of them",
        ),
        ("partition = 'other', spank_job_env = { 'OTHER_PLUGIN=1' }, comment = 'a comment'", "|0|nil|"),
        (f"partition = 'vm', user_id = 1000, {OPTION}", "in partition vm each node is a VM, so select an image with"),
        (f"user_id = 1000, {OPTION}", "in partition vm each node is a VM"),
        ("user_id = 1000, comment = 'vm:image=slim'", "vm:image=slim in --comment is for VMs inside jobs of other"),
    ],
)
def test_a_job_with_a_vm_inside_needs_the_feature_or_is_refused_with_a_sentence(
    site: Settings, fields: str, answer: str
) -> None:
    assert answer in submit(install_scripts(site), fields)


@needs_lua
def test_where_steps_launch_vms_a_user_is_told_to_do_so(site: Settings) -> None:
    by_tasks = replace(site, job_vms=replace(site.job_vms, design="tasks"))
    answer = submit(install_scripts(by_tasks), "partition = 'other', comment = 'vm:image=slim'")
    assert "has to call multiverse-vm" in answer and NOTE not in answer and "|job-vms|" in answer


@needs_lua
@pytest.mark.parametrize(
    ("asked", "gres", "answer"),
    [
        ("comment = 'vm:sriov'", "", "|0|vf:1|"),
        ("comment = 'vm:sriov=2,per-node=3'", "", "|0|vf:6|"),
        ("comment = 'vm:image=slim'", "gres:gpu:1", "|0|gres:gpu:1|"),
        ("spank_job_env = { 'PREFIX_sriov=(null)' }", "", "|0|vf:1|"),
        ("spank_job_env = { 'PREFIX_sriov=2', 'PREFIX_vm_per_node=2' }", "gres:gpu:1", "|0|gres:gpu:1,vf:4|"),
        (
            "comment = 'vm:sriov=5'",
            "",
            "vm:sriov=5 in --comment is wrong: give a number of virtual functions, from 1 to 4",
        ),
        (
            "comment = 'vm:sriov'",
            "gres:vf:2",
            "--sriov requests vf of Slurm for all VMs of the job: leave it out of --gres",
        ),
        ("comment = 'vm:sriov'", "gres/vf", "leave it out of --gres"),
        ("comment = 'vm:sriov'", "gres:vfs:1", "|0|gres:vfs:1,vf:1|"),
    ],
)
def test_slurm_is_asked_for_the_functions_of_all_vms_where_it_counts_them(
    site: Settings, asked: str, gres: str, answer: str
) -> None:
    counted = replace(site, job_vms=JobVmSettings(sriov_gres="vf"))
    asked = asked.replace("PREFIX", "_SLURM_SPANK_OPTION_multiverse")
    program = f"""
    slurm = {{ SUCCESS = 0, ERROR = -1, log_user = io.write }} dofile("job_submit.lua")
    local job = {{ partition = "other", gres = "{gres}", {asked} }}
    local code = slurm_job_submit(job, {{}}, 1000)
    io.write("|", code, "|", job.gres, "|")"""
    assert answer in run(install_scripts(counted), program)
    if "wrong" not in answer:
        assert run(install_scripts(site), program).endswith(f"|0|{gres}|")


@needs_lua
@pytest.mark.parametrize(
    ("fields", "record", "answer"),
    [
        ("features = ''", "features = 'a&job-vms', partition = 'other'", "|0|job-vms"),
        ("features = 'b|c'", "features = 'job-vms', partition = 'other'", "|0|(b|c)&job-vms"),
        ("features = 'b*2'", "features = 'job-vms', partition = 'other'", "counts and brackets"),
        ("features = 'b'", "features = 'job-vms|c', partition = 'other'", "|0|b"),
        ("features = 'b'", "partition = 'other'", "|0|b"),
        ("comment = 'vm:image=slim'", "partition = 'other'", "cancel the job and submit it again"),
        ("comment = 'mine'", "comment = 'vm:image=slim', partition = 'other'", "cancel the job and submit it again"),
        ("comment = 'mine vm:disk=1'", "comment = 'vm:disk=1', partition = 'other'", "|0|nil"),
        ("comment = 'mine'", "partition = 'other'", "|0|nil"),
    ],
)
def test_an_update_leaves_the_feature_and_the_words_of_the_comment(
    site: Settings, fields: str, record: str, answer: str
) -> None:
    program = f"local job = {{ {fields} }} local code = slurm_job_modify(job, {{ {record} }}, {PARTITIONS}, 1000)"
    shown = 'io.write("|", code, "|", tostring(job.features))'
    setup = "UP = { state_up = 3 } slurm = { SUCCESS = 0, ERROR = -1, log_user = io.write } dofile('job_submit.lua')"
    assert answer in run(install_scripts(site), f"{setup} {program} {shown}")


@needs_lua
def test_a_batch_script_has_the_options_in_its_environment_whatever_is_exported(site: Settings) -> None:
    directory = install_scripts(site)
    for asked in (OPTION, "comment = 'vm:image=slim,memory=1G'"):
        program = f"""
        slurm = {{ SUCCESS = 0, ERROR = -1, log_user = function() end }} dofile("job_submit.lua")
        local job = {{ partition = "other", script = "#!/bin/sh", environment = {{}}, {asked} }}
        slurm_job_submit(job, {{}}, 1000)
        io.write(job.environment._SLURM_SPANK_OPTION_multiverse_vm_image, " ",
          tostring(job.environment._SLURM_SPANK_OPTION_multiverse_memory_per_vm))"""
        assert run(directory, program) == ("slim 1G" if "comment" in asked else "slim nil")


@needs_lua
def test_without_multiverse_lua_no_job_with_a_vm_inside_is_accepted_and_all_others_are(site: Settings) -> None:
    directory = install_scripts(site)
    (directory / "multiverse_jobs.lua").unlink()
    for asked in (OPTION, "comment = 'see vm:image=slim'"):
        assert "could not check this job" in submit(directory, f"partition = 'other', {asked}")
    assert "|0|nil|" in submit(directory, "partition = 'other', comment = 'vms:'")


# --- the plugin ------------------------------------------------------------------------------------

_PROLOG = """
int main(int count, char *arguments[])
{
	/* For each line a job, as its prolog reads its comment: what is wrong with it, or what it asks for. */
	char line[1024];

	if (getenv("CONTEXT")) {
		slurm_spank_init(NULL, count - 1, arguments + 1);
		return printf("handed on: %s\\n", getenv("_SLURM_SPANK_OPTION_multiverse_vm_image")) < 0;
	}
	if (count > 1)
		return slurm_spank_job_prolog(NULL, count - 1, arguments + 1);
	while (fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\\x02")] = 0;
		memset(values, 0, sizeof values);
		*problem = 0;
		printf("%d ", take_comment(line));
		printf("%s", *problem ? "wrong" : "right");
		for (int i = 0; i < COUNT; i++)
			printf("%s%s", values[i], i < COUNT - 1 ? " " : "|");
	}
}
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plugin"), _PROLOG)


def _read(plugin: Path, comments: Sequence[str]) -> list[str]:
    text = "".join(f"{comment}\x02\n" for comment in comments)
    done = subprocess.run([plugin], input=text, capture_output=True, text=True, check=True)
    return done.stdout.split("|")[:-1]


_PIECES = [
    "vm:", "image", "vcpu", "memory", "disk", "sriov", "ivshmem", "net", "=", ",", " ", "\t", "\u00a0", "slim", "-a",
    ".b", "1", "0", "1023K", "25", "G", "m", "T", "x", "9" * 10, "4096", "4097", "32", "33", "64", "65", "65536T",
    "9" * 30,
]  # fmt: skip


@needs_lua
@needs_plugin
@hypothesis_settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)
        | st.tuples(st.sampled_from(_PIECES[1:9]), st.sampled_from(_PIECES), st.sampled_from(_PIECES)).map(
            lambda one: f"vm:{one[0]}={one[1]}{one[2]}"
        ),
        min_size=20,
        max_size=40,
    )
)
def test_the_script_refuses_exactly_the_comments_that_the_plugin_does_not_understand(
    tmp_path_factory: pytest.TempPathFactory, plugin: Path, comments: list[str]
) -> None:
    directory: Path = tmp_path_factory.mktemp("site")
    site = Settings(slurm=SlurmSettings(conf=directory / "slurm.conf", inbox=directory / "inbox"))
    answers = submit_each(install_scripts(site), [f"partition = 'other', comment = '{one}'" for one in comments])
    for comment, answer, said in zip(comments, answers, _read(plugin, comments), strict=True):
        assert answer.accepted == ("right" in said), (comment, answer.message, said)
        assert (answer.message == "") == (said.startswith("0")), (comment, answer.message, said)


@needs_plugin
def test_the_plugin_hands_on_what_a_comment_asks_for_in_mebibytes(plugin: Path) -> None:
    asked = ["vm:image=slim,vcpu=2 run 7 vm:memory=1G vm:disk=2T", "vm:per-node=2,memory=1025k,ivshmem=4", "my vm"]
    assert _read(plugin, asked) == ["1 rightslim 2 1024 2097152   ", "1 right  2  2  4", "0 right      "]
    asked = ["vm:sriov", "vm:sriov=", "vm:sriov=4", "vm:sriov=5", "vm:sriov=(null)", "vm:sriov=01", "vm:image"]
    none, one, four = "1 wrong      ", "1 right     1 ", "1 right     4 "
    assert _read(plugin, asked) == [one, one, four, none, one, one, none]


def _record(**given: str) -> str:
    keys = ("image", "cpus", "memory", "disk", "vms", "functions", "regions", "nodes", "node")
    return " ".join(f"{key}={given.get(key, '')}" for key in keys) + "\n"


def _prolog(plugin: Path, records: Path, **environment: str) -> str:
    variables = {key.replace("_", "-") if key.islower() else key: value for key, value in environment.items()}
    done = subprocess.run(
        [plugin, f"records={records}"], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, "a prolog that fails drains the node"
    return done.stdout


@needs_plugin
def test_the_prolog_records_what_a_job_asks_for_or_why_it_cannot_have_it(plugin: Path, tmp_path: Path) -> None:
    record = tmp_path / "7"
    _prolog(plugin, tmp_path, SLURM_JOB_COMMENT="a job")
    assert not record.exists()
    for environment, content in (
        ({"SLURM_JOB_COMMENT": "vm:vcpu=2"}, _record(cpus="2")),
        ({"SLURM_JOB_COMMENT": "vm:vcpu=2", "vm_image": "slim"}, _record(image="slim")),
        ({"ivshmem": "2"}, _record(regions="2")),
        ({"ivshmem": "0"}, "error --ivshmem=0: it is a number of regions of shared memory, from 1 to 32\n"),
        (
            {"SLURM_JOB_COMMENT": "vm:vcpu=x"},
            "error vm:vcpu=x in --comment: it is a number of virtual CPUs, at least 1\n",
        ),
        ({"sriov": "(null)"}, _record(functions="1")),
        ({"sriov": "5"}, "error --sriov=5: it is a number of virtual functions, from 1 to 4\n"),
        ({"vm_image": "/"}, "error --vm-image=/: an image's name has letters, digits and ._- only\n"),
    ):
        assert _prolog(plugin, tmp_path, **environment) == ""
        assert record.read_text() == content


@needs_plugin
def test_a_job_that_cannot_be_recorded_is_told_so_and_cancelled(plugin: Path, tmp_path: Path) -> None:
    for records, reason in ((tmp_path / "a" / "b", errno.ENOENT), (Path("/dev/null"), errno.ENOTDIR)):
        said = _prolog(plugin, records, vm_image="slim").splitlines()
        assert said[0].startswith("notify 7 ") and os.strerror(reason) in said[0] and said[1:] == ["kill 7 9"]
        assert _prolog(plugin, records) == "", "no concern of other jobs"


def _load(plugin: Path, context: str, *arguments: str, **environment: str) -> str:
    variables = {"CONTEXT": context, "_SLURM_SPANK_OPTION_multiverse_vm_image": "slim", **environment}
    argv = [str(plugin), *arguments]
    return subprocess.run(argv, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


@needs_plugin
def test_a_job_that_is_submitted_within_a_job_does_not_inherit_its_options(plugin: Path) -> None:
    assert _load(plugin, "sbatch") == "handed on: (null)\n"
    assert _load(plugin, "srun") == "handed on: slim\n", "a step of the job"


@needs_plugin
def test_the_plugin_tells_the_agent_what_does_not_work(plugin: Path, tmp_path: Path) -> None:
    def test(**arguments: Path) -> str:
        words = [f"{key}={value}" for key, value in arguments.items()]
        head, said, _ = _load(plugin, "srun", *words, **{TEST: "1"}).splitlines()
        assert head == f"multiverse-plugin protocol={PROTOCOL} feature=job-vms records={arguments['records']}"
        return said.removeprefix("multiverse-plugin ")

    absent, enter = tmp_path / "absent", Path("/bin/true")
    assert test(records=tmp_path, enter=absent) == f"cannot execute {absent}: No such file or directory"
    assert test(records=absent / "r", enter=enter).startswith(f"cannot record jobs in {absent}/r: No such file")
    assert test(records=tmp_path, enter=enter, agent=absent).startswith("the agent of this host does not answer")
    assert list(tmp_path.iterdir()) == []
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "sock"))
        agent.listen()
        agent.settimeout(60)
        answering = threading.Thread(target=_answer, args=(agent,))
        answering.start()
        assert test(records=tmp_path, enter=enter, agent=tmp_path / "sock") == "works"
        answering.join()
    assert "plugin" not in _load(plugin, "srun"), "it is tested only if it is asked to"


def _answer(agent: socket.socket) -> None:
    connection, _ = agent.accept()
    with connection:
        assert parse(connection.recv(100)) is PlainRequest.TEST
        connection.sendall(answer_of_agent())


def test_the_plugin_and_the_agent_speak_one_protocol_and_name_one_feature() -> None:
    source = (SPANK / "multiverse.c").read_text()
    assert f"#define PROTOCOL {PROTOCOL} " in source
    settings = Settings().job_vms
    assert f'*feature = "{settings.feature}"' in source and f"feature={settings.feature}" in plugstack(settings)


@needs_lua
def test_the_gates_partition_keeps_its_own_words(site: Settings) -> None:
    assert modify(install_scripts(site), "comment = 'vm:net=1G'", "partition = 'vm', comment = 'vm:net=1000'") != ""
