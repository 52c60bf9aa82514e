"""Hosts that are borrowed from the scheduler: what they would have, when one is asked for and when given back."""
