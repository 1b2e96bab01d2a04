"""The time that a test waits for something that must come."""

# Ends a test that hangs. It is far more than anything takes on a busy machine, and no test measures
# it.
HANG_SECONDS = 900.0
