"""The planner's policy, as the settings say it."""

from __future__ import annotations

import ipaddress
from typing import Any

from multiverse.config import Settings
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.policy import Backfill, LeasePolicy, OverflowPolicy, Policy, Pool

MOVE_MARGIN = 60.0  # seconds that the hosts have, beyond their own time limit, to say that they gave a move up
DESTROYED = 3.0  # seconds that the destruction of a VM takes, with what comes before it in its lane


def _same(settings: object, names: str) -> dict[str, Any]:
    """The settings that have the same names in the policy."""
    return {name: getattr(settings, name) for name in names.split()}


def policy_of(settings: Settings) -> Policy:
    s, p = settings, settings.pacing
    return Policy(
        subnet=ipaddress.IPv4Network(s.network.subnet),
        gateway=s.network.gateway,
        first_address=s.network.first,
        image=s.image.default,
        kind=s.image.kind,
        base=Size(s.qemu.base_cpus, s.qemu.base_memory),
        guest_reserve=s.image.guest_reserve,
        scratch=s.image.scratch,
        placement=s.placement.policy,
        **_same(p, "provisioning silence spawn_timeout pin_timeout complete_timeout"),
        **_same(p, "retry_base retry_limit replacements attempts"),
        sleep_after=s.save.sleep_after if s.save.enabled else 0.0,
        save_before=s.save.before,
        save_max_runs=s.save.max_runs,
        save_checkpoint_every=s.save.checkpoint_every,
        save_checkpoints=s.save.checkpoints,
        save_user_quota=s.save.user_quota << 20,
        save_site_quota=s.save.site_quota << 20,
        save_keep=s.save.keep_days * 86400.0,
        save_encrypt=s.save.encrypt,
        save_no_requeue=s.save.no_requeue,
        moves_at_once=s.move.at_once,
        move_timeout=s.move.timeout + MOVE_MARGIN,
        evict_drains=s.rebalance.drains,
        evict_maintenance=s.rebalance.maintenance,
        maintenance_notice=s.rebalance.notice,
        evict_preemption=s.rebalance.preemption,
        evict_leases=s.rebalance.leases,
        evict_at_once=s.rebalance.at_once,
        evict_rate=s.rebalance.bandwidth,
        evict_per_job=s.rebalance.per_job,
        evict_alert=s.rebalance.alert_after,
        evict_host_rate=s.rebalance.host_rate,
        lease_keeps=s.rebalance.keeps,
        here=s.host.name,
        fences=bool(s.fence.command),
        fence_after=s.fence.after,
        quorum=s.fence.quorum,
        backfill=Backfill(s.backfill.depth, s.backfill.overtakes) if s.backfill.enabled else None,
        # A guest writes back, and two observations are to show that the job, and then the VM, is gone.
        reclaim=p.reclaim_grace + 2 * s.poll + DESTROYED,
        pools=tuple(
            Pool(
                image=pool.image,
                depth=pool.depth,
                least=pool.min,
                most=pool.max or pool.min,
                size=Size(pool.cpus, pool.memory),
                max_age=pool.max_age,
                offer=pool.offer,
            )
            for pool in s.pool
        ),
        leases=tuple(
            LeasePolicy(
                size=Size(lease.cpus, lease.memory),
                most=lease.max,
                **_same(lease, "partition account user time_limit min_wait idle start_timeout preemptable_ok fence"),
            )
            for lease in s.lease
        ),
        overflows=tuple(OverflowPolicy(one.partition, one.constraint, one.accounts) for one in s.overflow),
        rates={CloneKind.INSTANT: p.instant_rate, CloneKind.LINKED: p.linked_rate, CloneKind.FULL: p.full_rate},
    )
