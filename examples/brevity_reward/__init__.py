"""A reward that charges for long episodes."""
