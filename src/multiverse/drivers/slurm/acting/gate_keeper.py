"""Keeps the gate closed: looks after the reservation that holds the licence, and after the gate's nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection

import structlog

from multiverse.config import SlurmSettings
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import conf
from multiverse.drivers.slurm.site.gate import has_licence, on_gate

log = structlog.get_logger()

_CHECKED_EVERY = 60.0  # seconds between two looks at the reservation and at the gate's nodes
_POWERED_DOWN = 600.0  # seconds within which Slurm has powered all nodes of the gate down (SuspendRate, SuspendTimeout)
_HALF_A_YEAR = 183 * 86400  # seconds; a reservation without an end lasts a year (YEAR_SECONDS in reservation.c)


class GateKeeper:
    """Keeps the gate closed: looks after the reservation that holds the licence, and after the gate's nodes."""

    def __init__(
        self, slurm: SlurmSettings, commands: SlurmCommands, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slurm, self._commands, self._clock = slurm, commands, clock
        self._reservation = slurm.gate_feature  # its name
        self._due = 0.0
        self._power_down_until = clock() + _CHECKED_EVERY  # once: an earlier controller may have powered nodes down

    async def tend(self) -> None:
        """See once a minute that the licence is held and that the gate's nodes are in service. If slurmctld answers
        that this is impossible, that is logged: jobs can still be observed."""
        if self._clock() < self._due:
            return
        try:
            await self._hold_licence()
            await self._put_in_service()
            if self._clock() < self._power_down_until:
                await self._set_addresses()
        except (Refused, Gone) as error:
            log.error("the gate cannot be closed", reason=str(error), hint="run multiverse site check")
        self._due = self._clock() + _CHECKED_EVERY

    def look_again(self) -> None:
        """Let the next `tend` look at once: a job got past the gate."""
        self._due = 0.0

    async def _hold_licence(self) -> None:
        wanted = f"{self._slurm.licence}:1"
        found = await self._find()
        named = f"ReservationName={self._reservation}"
        if found is None:
            log.info("reserving the gate's licence", licence=wanted, reservation=self._reservation)
            await self._commands.run(
                *("scontrol", "create", "reservation", named, "Users=root", f"Licenses={wanted}"),
                *("StartTime=now", "Duration=UNLIMITED", "Flags=LICENSE_ONLY"),
            )
        elif not has_licence(found[0], self._slurm.licence):
            await self._commands.run("scontrol", "update", named, f"Licenses={wanted}")
        elif found[1] - time.time() < _HALF_A_YEAR:
            await self._commands.run("scontrol", "update", named, "Duration=UNLIMITED")

    async def _find(self) -> tuple[str, float] | None:
        """The licences of the reservation and its end (Unix time); None if there is no reservation."""
        try:
            text = await self._commands.run("scontrol", "show", "reservation", self._reservation, "--oneliner")
        except (Gone, Refused):
            return None
        fields = dict(re.findall(r"(\w+)=(\S*)", text))
        if fields.get("ReservationName") != self._reservation:
            return None
        try:
            ends = time.mktime(time.strptime(fields.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            ends = float("inf")
        return fields.get("Licenses", ""), ends

    async def _put_in_service(self) -> None:
        """Undo what took a node of the gate out of service: an operator, or a job that got past the licence. Nodes that
        are powered down, as they should be, are not shown before 23.02."""
        shown = await self._commands.run(
            *("sinfo", "-h", "-N", "-p", self._slurm.partition, "-t", "down,drain,fail", "-o", "%N")
        )
        nodes = sorted({name for name in shown.split() if on_gate([name])})
        if nodes:
            log.info("putting nodes of the gate in service", nodes=len(nodes))
            await self.release(nodes)

    async def release(self, nodes: Collection[str]) -> None:
        """Let nodes of the gate be powered down and free again, whatever state they are in."""
        name = f"NodeName={','.join(nodes)}"
        for state in (("State=DOWN", "Reason=multiverse gate"), ("State=RESUME",), ("State=POWER_DOWN_FORCE",)):
            try:
                await self._commands.run("scontrol", "update", name, *state)
            except MultiverseError as error:
                log.debug("node of the gate", state=state[0], reason=str(error))
        self._power_down_until = self._clock() + _POWERED_DOWN

    async def _set_addresses(self) -> None:
        """Give the gate's nodes their addresses back. When Slurm powers a node down, its name becomes its address (with
        cloud_reg_addrs, and always from 23.11 on: power_save.c), and slurmctld stands still while it looks that up."""
        ours = conf.read(self._slurm.conf).ours
        for one in conf.records(ours, "NodeName"):
            name, address = f"NodeName={one['nodename']}", f"NodeAddr={one.get('nodeaddr', '')}"
            await self._commands.run("scontrol", "update", name, address)
