"""EvenEP: balanced expert parallelism. Every rank does the same work, whatever the router chose."""
