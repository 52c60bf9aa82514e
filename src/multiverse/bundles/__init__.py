"""Everything that a kind of hypervisor or of scheduler brings, each as one bundle."""
