"""DecEx-RAG: search trees are grown, and their best chains and preference pairs are learnt."""
