"""How a kernel overlaps with its neighbours in a chain of launches."""
