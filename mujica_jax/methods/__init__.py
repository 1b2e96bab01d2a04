"""The training recipes: supervised warm-up, MyGO, GRPO and DAPO, EviPath, and DecEx-RAG."""
