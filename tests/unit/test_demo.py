"""What the demonstration begins with."""

from __future__ import annotations

from multiverse.bench.latency import LatencySamples
from multiverse.cli.demo_first import BARE, VM, lines


def test_both_are_shown_in_proportion_with_where_the_time_went() -> None:
    found = {
        VM: LatencySamples(submit_to_start=[1.6, 1.4, 1.5], stages={"queued": [0.1], "clone": [0.2], "launch": [0.5]}),
        BARE: LatencySamples(submit_to_start=[0.75, 0.7, 0.8]),
    }
    for width in (80, 140):
        vm, bare, parts, rest = (line.plain for line in lines(found, width))
        assert "1.50 s" in vm
        assert "0.75 s" in bare
        assert abs(vm.count("━") - 2 * bare.count("━")) <= 1
        assert parts.split()[:8] == ["of", "that", "queued", "0.10", "clone", "0.20", "launch", "0.50"]
        assert max(map(len, (vm, bare, parts, rest))) <= width
