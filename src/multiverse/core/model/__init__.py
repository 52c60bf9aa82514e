"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`, `began`) come from
`Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""
