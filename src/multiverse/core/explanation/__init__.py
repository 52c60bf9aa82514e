"""Answers on request: why a job waits, what each host lacks for it, what would become of a request. They change
nothing."""
