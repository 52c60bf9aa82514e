"""VMs of different jobs on the real lab: which of them reach each other, and by which names, seen from inside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.own_etc import has_own_etc
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import AGENT, CONTROLLER
from multiverse_lab.lab.users import PrivateUser
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.watch import ended, nothing_left, until, written

pytestmark = pytest.mark.integration

# Answers each client with its own name, and with what becomes of a connection to the name that the client has sent.
SERVER = """
import json, os, socket, sys, time
home = sys.argv[1]
own = socket.gethostname()
server = socket.create_server((socket.gethostbyname(own), 7100))
server.settimeout(0.2)
with open(f"{home}/server.new", "w") as file:
    json.dump([own, socket.gethostbyname(own)], file)
os.rename(f"{home}/server.new", f"{home}/server")
while not os.path.exists(f"{home}/stop"):
    try:
        connection = server.accept()[0]
    except TimeoutError:
        continue
    connection.settimeout(60)
    with connection, connection.makefile("rw") as stream:
        line = stream.readline()
        if not line:  # one that only tries whether it gets here
            continue
        name, port = json.loads(line)
        for _ in range(100):  # names of later VMs come beside their start
            try:
                back = socket.create_connection((name, port), 10)
                back.close()
                why = ""
                break
            except socket.gaierror as error:
                why = str(error)
                time.sleep(0.1)
            except OSError as error:
                why = str(error)
                break
        print(json.dumps([own, why]), file=stream, flush=True)
"""

# Prints what becomes of a connection to the server by its name, and by its address.
CLIENT = """
import json, socket, sys
name, address = sys.argv[1:]
own = socket.gethostname()
def attempt(target):
    try:
        end = socket.create_server((socket.gethostbyname(own), 0))
        with socket.create_connection((target, 7100), 10) as connection, connection.makefile("rw") as stream:
            connection.settimeout(90)
            print(json.dumps([own, end.getsockname()[1]]), file=stream, flush=True)
            return json.loads(stream.readline())
    except socket.gaierror:
        return "unknown"
    except OSError as error:
        return "refused"
print(json.dumps([own, {"name": attempt(name), "address": attempt(address)}]))
"""

OUTSIDE = """
import socket, sys
socket.create_connection((sys.argv[1], 7100), 10)
print(socket.gethostbyname(sys.argv[1]))
"""


@contextmanager
def settings(lab: LabUnderTest, text: str) -> Iterator[None]:
    """The controller runs with these settings in addition."""
    assert has_own_etc(), "this machine's stays as it is"
    assert str(lab.settings.network.names) == "/etc/hosts"
    with more_settings(lab, "[network]\n" + text):
        yield


@pytest.fixture(autouse=True)
def _left(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[None]:
    yield
    lab.run("scancel", "--partition=vm", check=False)
    nothing_left(lab, Client(lab.settings.socket))


@contextmanager
def server(lab: LabUnderTest, client: Client, *options: str) -> Iterator[tuple[str, str]]:
    """A job of the user that serves; its VM's name and address."""
    home = lab.user.home
    for name in ("server", "stop"):
        (home / name).unlink(missing_ok=True)
    (home / "server.py").write_text(SERVER)
    size = options or ("--mem=300",)
    job = lab.sbatch(f"exec python3 {home}/server.py {home}", *size, f"--output={home}/server.out")
    until("the server listens", (home / "server").exists)  # its template may have to be built
    yield tuple(json.loads((home / "server").read_text()))
    (home / "stop").touch()
    ended(client, job, "done")


def tried(lab: LabUnderTest, client: Client, user: PrivateUser, where: tuple[str, str]) -> dict[str, Any]:
    """What a client in a job of a user reaches."""
    return tried_in(lab, client, user, where)[1]


def tried_in(
    lab: LabUnderTest, client: Client, user: PrivateUser, where: tuple[str, str], *options: str
) -> tuple[str, dict[str, Any]]:
    """In which VM such a client ran, and what it reached."""
    (user.home / "client.py").write_text(CLIENT)
    out = user.home / "client.out"
    out.unlink(missing_ok=True)
    size = options or ("--mem=300",)
    job = lab.sbatch(f"exec python3 {user.home}/client.py {' '.join(where)}", *size, f"--output={out}", user=user)
    ended(client, job, "done")
    vm, found = json.loads(written(out))
    return vm, found


def test_jobs_of_one_user_reach_each_other_by_name_and_those_of_another_one_do_not(
    lab: LabUnderTest, client: Client
) -> None:
    with settings(lab, ""), server(lab, client) as where:
        name, address = where
        assert tried(lab, client, lab.user, where) == {"name": [name, ""], "address": [name, ""]}
        assert tried(lab, client, lab.other, where) == {"name": "unknown", "address": "refused"}
        # From the machine where users submit, also another one, as to any node.
        for user in (lab.user, lab.other):
            found = lab.run("python3", "-c", OUTSIDE, name, user=user, check=False)
            assert (found.stdout.strip(), found.stderr) == (address, ""), Path("/etc/hosts").read_text()
        # What was told outlives those who told it.
        for service in (CONTROLLER, AGENT):
            asyncio.run(service.stop(lab.where))
        asyncio.run(lifecycle.up(lab.where, LabOptions()))
        assert tried(lab, client, lab.user, where)["name"] == [name, ""]
        assert tried(lab, client, lab.other, where) == {"name": "unknown", "address": "refused"}
    until("its name is gone", lambda: name not in Path("/etc/hosts").read_text())


@pytest.mark.slow
def test_a_spare_that_a_job_takes_reaches_the_other_vms_of_its_user(lab: LabUnderTest, client: Client) -> None:
    pool = '[[pool]]\ndepth = "joined"\nmin = 1\nmemory = 300\n'
    with server(lab, client) as where, settings(lab, pool):

        def spares() -> list[str]:
            return [vm["name"] for vm in client.vms() if vm["state"] == "joined" and not vm["job_id"]]

        for user, reached in ((lab.other, False), (lab.user, True)):
            (spare,) = until("there is a spare", spares)
            good = [where[0], ""]
            expected = {"name": good, "address": good} if reached else {"name": "unknown", "address": "refused"}
            assert tried_in(lab, client, user, where) == (spare, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("reach", "own", "others"), [("job", False, False), ("site", True, True)])
def test_a_site_chooses_who_reaches_whom(
    lab: LabUnderTest, client: Client, reach: str, own: bool, others: bool
) -> None:
    with settings(lab, f'reach = "{reach}"\n'), server(lab, client) as where:
        for user, reached in ((lab.user, own), (lab.other, others)):
            found = tried(lab, client, user, where)
            good = [where[0], ""]
            assert found == ({"name": good, "address": good} if reached else {"name": "unknown", "address": "refused"})
