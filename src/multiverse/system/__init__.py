"""Small wrappers around the operating system that every layer above `core` may use; each has one module."""
