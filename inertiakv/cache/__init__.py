"""What is kept: K and V in static slots, and the retention sets that say which token is in which slot."""
