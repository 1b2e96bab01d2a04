"""Search: what a retriever answers, over passages and over a knowledge graph, here or served."""
