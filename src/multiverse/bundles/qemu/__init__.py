"""QEMU on hosts with agents, as a platform."""
