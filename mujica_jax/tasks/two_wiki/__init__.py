"""2WikiMultihopQA in its official record formats, over triples and over passages."""
