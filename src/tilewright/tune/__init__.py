"""Which kernel solves a problem on a device."""
