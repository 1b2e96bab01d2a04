"""The tiny world: a generated encyclopaedia with questions, for runs without a download."""
