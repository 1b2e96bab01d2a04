"""Data sets whose questions are answered from a corpus of passages, and QALD over Wikidata."""
