"""The client of the API: every failure is an error of ours, with a next step."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import httpx
import pytest

from multiverse.client import Client
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown


def test_a_missing_socket_is_refused_and_the_path_is_named(tmp_path: Path) -> None:
    with Client(tmp_path / "none") as client, pytest.raises(Refused, match="no daemon listens at") as caught:
        client.status()
    assert str(tmp_path / "none") in caught.value.message and "systemctl start multiverse" in caught.value.hint


def test_a_socket_that_nobody_listens_at_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Client(path) as client, pytest.raises(Refused, match="is not running") as caught:
        client.status()
    assert caught.value.hint


def test_a_daemon_that_does_not_answer_in_time_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with Client(path, timeout=0.05) as client, pytest.raises(Unknown, match="did not answer") as caught:
            client.status()
    assert caught.value.hint


@pytest.mark.parametrize(("status", "error"), [(404, Gone), (409, MultiverseError), (503, MultiverseError)])
def test_a_refusal_of_the_daemon_is_an_error_with_its_words(status: int, error: type[MultiverseError]) -> None:
    answer = httpx.Response(status, json={"detail": "not this time"})
    with (
        Client(Path("/none")) as client,
        mock.patch.object(client._http, "request", return_value=answer),
        pytest.raises(error, match="not this time") as caught,
    ):
        client.repair("h1")
    assert type(caught.value) is error and caught.value.hint


def test_a_user_who_may_not_use_the_socket_is_told_what_they_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(MultiverseError, match="not yours to use") as refused, Client(path) as client:
        client.status()
    assert "users: squeue, multiverse explain" in refused.value.hint
