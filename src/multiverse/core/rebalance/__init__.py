"""Evictions: which running jobs leave their hosts, why, and how, so that others have room or a host can be emptied.

A method proposes steps: `drains` and `preemption`. A step is one move of a VM or one save of a job. What a method
proposes was tried on a copy of what is free: where each VM would go, and whether that helps. The steps are kept within
limits (`limits`), and each is checked again as it begins. Nothing of a plan is remembered: each pass plans anew from
what it observes, and counts what is leaving already as free. So a plan that the world has overtaken is given up by
itself.
"""
