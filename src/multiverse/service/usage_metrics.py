"""What hosts and VMs use, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from multiverse.core.model import HostUsage, Usage

_MIB = 1 << 20

_GAUGES: dict[str, tuple[str, str, float]] = {
    "cpus": ("cpus_used", "CPUs in use.", 1),
    "memory": ("memory_used_bytes", "Memory in use.", _MIB),
    "active": ("memory_active_bytes", "Memory in use that was used lately.", _MIB),
    "received": ("received_bytes_per_second", "Received from the network.", 1),
    "sent": ("sent_bytes_per_second", "Sent to the network.", 1),
    "read": ("read_bytes_per_second", "Read from disks.", 1),
    "written": ("written_bytes_per_second", "Written to disks.", 1),
    "cpu_pressure": ("cpu_pressure", "Share of the time in which a process waited for a CPU.", 1),
    "memory_pressure": ("memory_pressure", "Share of the time in which a process waited for memory.", 1),
    "io_pressure": ("io_pressure", "Share of the time in which a process waited for a disk.", 1),
}
"""By figure of `Usage`: the end of the metric's name, its help, and by what the figure is multiplied."""


def families(hosts: Mapping[str, HostUsage]) -> Iterator[Metric]:
    """The metrics of these hosts, by name, and of their VMs: means of the last seconds, but for the counters."""
    of_hosts = [((name,), host.usage) for name, host in sorted(hosts.items()) if host.usage]
    of_vms = [
        ((name, vm), one.usage)
        for name, host in sorted(hosts.items())
        for vm, one in sorted(host.vms.items())
        if one.usage
    ]
    yield from _gauges("multiverse_host", ("host",), of_hosts)
    yield from _gauges("multiverse_vm", ("host", "vm"), of_vms)
    cpu = CounterMetricFamily(
        "multiverse_vm_cpu_seconds", "CPU time of the VM's process since its start.", labels=("host", "vm")
    )
    peak = GaugeMetricFamily(
        "multiverse_vm_memory_peak_bytes", "The most memory that the VM had since its start.", labels=("host", "vm")
    )
    for name, host in sorted(hosts.items()):
        for vm, one in sorted(host.vms.items()):
            if one.usage:
                cpu.add_metric((name, vm), one.cpu_s)
                peak.add_metric((name, vm), one.peak * _MIB)
    yield from (cpu, peak)


def _gauges(prefix: str, labels: tuple[str, ...], usages: Sequence[tuple[tuple[str, ...], Usage]]) -> Iterator[Metric]:
    for figure, (name, text, factor) in _GAUGES.items():
        metric = GaugeMetricFamily(f"{prefix}_{name}", text, labels=labels)
        for values, usage in usages:
            if (value := getattr(usage, figure)) is not None:
                metric.add_metric(values, value * factor)
        yield metric
