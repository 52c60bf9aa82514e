"""What the controller's side asks the agents of both hosts about a move."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from multiverse.agent import protocol
from multiverse.agent.connection import AgentConnection
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import Stage, VmRef, VmSpec

HERE, THERE = VmRef("mvaaaaa-1", "a", "token"), VmRef("mvaaaaa-1", "b", "token")
SPEC = VmSpec("mvaaaaa-1", "b", "slim", CloneKind.FULL, Size(1, 256), "02:00:00:00:00:01", token="token", source="b")
OFFER = protocol.MoveOffer(address="10.0.0.2", port=14790, certificate="pem")


class Agent:
    """Answers as it is told, and keeps what it is asked."""

    def __init__(self, host: str, answers: Mapping[str, Any]) -> None:
        self.host, self.answers = host, answers
        self.asked: list[protocol.AgentCall[Any]] = []

    async def call(self, call: protocol.AgentCall[Any]) -> Any:
        self.asked.append(call)
        answer = self.answers.get(call.name, protocol.Nothing())
        if isinstance(answer, MultiverseError):
            raise answer
        return answer


def asked(here: Any, there: Any, do: str = "settle") -> tuple[list[Any], list[Any], MultiverseError | None]:
    """What both are asked, and the error that comes of it. Each says what it has, or raises an error."""
    answers = [one if isinstance(one, dict) else {"cancel_move": holds(one)} for one in (here, there)]
    agents = {host: Agent(host, its) for host, its in zip("ab", answers, strict=True)}
    hypervisor = AgentHypervisor(["a", "b"], lambda host: cast(AgentConnection, agents[host]))
    problem = None
    try:
        if do == "settle":
            asyncio.run(hypervisor.settle(HERE, 3, THERE))
        else:
            asyncio.run(as_coroutine(hypervisor))
    except MultiverseError as error:
        problem = error
    return agents["a"].asked, agents["b"].asked, problem


async def as_coroutine(hypervisor: AgentHypervisor) -> None:
    assert await hypervisor.move(HERE, 3, SPEC) == (Stage("memory", 0.1),)


def holds(what: str | MultiverseError) -> Any:
    return what if isinstance(what, MultiverseError) else protocol.MoveEnd(has=cast(protocol.MoveHolds, what))


def test_the_target_is_asked_first_and_both_get_the_same_secret() -> None:
    stages = protocol.Stages(stages=(Stage("memory", 0.1),))
    at_a, at_b, problem = asked({"send_move": stages}, {"receive_move": OFFER}, "move")
    assert problem is None
    ((send,), (receive,)) = at_a, at_b
    assert (receive.vm, receive.number) == (SPEC, 3)
    assert (send.vm, send.number, send.offer, send.secret) == (HERE, 3, OFFER, receive.secret)
    assert len(send.secret) >= 32


def test_a_vm_is_not_sent_to_a_host_that_refuses_it() -> None:
    at_a, _, problem = asked({}, {"receive_move": Refused("no")}, "move")
    assert at_a == [] and isinstance(problem, Refused)


@pytest.mark.parametrize(
    ("here", "there"), [("kept", "absent"), ("absent", "received"), ("absent", "absent"), ("kept", "kept")]
)
def test_a_move_that_has_ended_at_both_needs_nothing_more(here: str, there: str) -> None:
    at_a, at_b, problem = asked(here, there)
    cancel = [protocol.CancelMove(vm=one, number=3) for one in (HERE, THERE)]
    assert (at_a, at_b, problem) == ([cancel[0]], [cancel[1]], None)


def test_what_the_other_host_has_taken_over_is_destroyed_where_it_was() -> None:
    at_a, at_b, problem = asked("handed_over", "received")
    assert at_a[1:] == [protocol.Destroy(vm=HERE, grace=0.0)] and len(at_b) == 1 and problem is None


def test_what_no_other_host_has_goes_on_where_it_was() -> None:
    at_a, at_b, problem = asked("handed_over", "absent")
    assert at_a[1:] == [protocol.CancelMove(vm=HERE, number=3, absent=True)] and len(at_b) == 1 and problem is None


@pytest.mark.parametrize(("here", "there"), [("handed_over", Unknown("away")), (Unknown("away"), "received")])
def test_both_are_asked_and_nothing_is_concluded_without_an_answer(here: Any, there: Any) -> None:
    at_a, at_b, problem = asked(here, there)
    assert len(at_a) == len(at_b) == 1 and isinstance(problem, Unknown)
