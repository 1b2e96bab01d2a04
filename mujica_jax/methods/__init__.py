"""The recipes: MyGO, GRPO and DAPO, EviPath, DecEx-RAG, and the supervised warm-up."""
