"""Which kernel solves a problem: measured, checked, kept and explained."""

from tilewright.tune.select import explain, policy

__all__ = ["explain", "policy"]
