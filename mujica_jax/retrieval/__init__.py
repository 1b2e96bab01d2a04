"""Search over text passages and over a knowledge graph, in this process or at a service."""
