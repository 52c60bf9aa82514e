"""How VMs are made: which kind of clone, of which template or spare, how many a second, and their rows."""
