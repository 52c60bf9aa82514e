"""The guest agent: the only resident process of ours in a guest. It uses the standard library only, and no shell.

These modules become one file when an image is built (`multiverse.guest.assemble`). In a slim image that file is the
first process of the guest; in a stock image systemd starts it. The agent prepares the guest, reports that it is at the
fork point, and blocks in a read. A template is frozen there. Each clone continues in that read, with its identity
already in the channel, and applies it: randomness first, because until then the clone would draw the same random bytes
as its siblings; then clock, names, addresses, users, files, daemons and mounts.

The agent uses system calls instead of programs: on an emulated CPU an exec takes 30 ms, and a system call takes next to
nothing. An emulator translates each piece of code the first time that it runs, so a clone starts faster the less
*different* code it runs, in Python and in the kernel alike. For this reason files are written in place, descriptors are
used without buffers, addresses are set by one netlink message each, and nothing is hashed. Modules with a random state
of their own (random, tempfile, uuid) are never imported here, because all clones would share that state.
"""
