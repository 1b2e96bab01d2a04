"""2WikiMultihopQA, read from its official files, over a knowledge graph or over passages."""
