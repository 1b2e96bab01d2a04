"""JetStream: its engine interface, a generator that uses this interface, and its gRPC protocol."""
