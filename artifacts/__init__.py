"""The artifact format: frozen values, digests, reading and atomic writing. Nothing runs here."""
