"""A lab: a whole cluster on this machine, in one directory."""
