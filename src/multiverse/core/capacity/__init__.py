"""What is free on each host, what VMs and templates claim of it, and on which hosts VMs are placed."""
