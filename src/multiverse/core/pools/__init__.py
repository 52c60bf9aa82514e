"""The warm pools: how many spares there are, and which of them are on offer to jobs as they come."""
