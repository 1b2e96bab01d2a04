"""DecEx-RAG: grow search trees, and learn their best chains and preference pairs."""
