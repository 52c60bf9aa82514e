"""The agent of a host, which does there what a controller asks, and the controller's hypervisor behind such agents."""
