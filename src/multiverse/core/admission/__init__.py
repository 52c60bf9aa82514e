"""Which waiting jobs start now, which wait and why, and what gives way to them."""
