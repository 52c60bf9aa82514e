"""What runs in a guest: the guest agent, how it is assembled into one file, and the protocol of its channel."""
