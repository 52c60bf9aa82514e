"""The hypervisor hosts of a lab: each has namespaces of its own on this machine, and a port at the lab's switch."""
