"""Knowledge graphs: triples in memory, an RDF store on disk, or a SPARQL endpoint."""
