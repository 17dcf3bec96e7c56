"""Sums over the ranks of a group: one protocol, several transports and algorithms (design §7)."""
