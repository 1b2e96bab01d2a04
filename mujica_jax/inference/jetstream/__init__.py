"""JetStream: its engine interface around our engine, and its gRPC protocol."""
