"""Knowledge graphs: triples in memory, an embedded RDF store, or a SPARQL endpoint."""
