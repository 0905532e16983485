"""Doors to other libraries. Each is imported by itself, since it needs its library."""
