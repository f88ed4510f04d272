"""What the jobs train: real models with real losses, and generators of index sets. No download, no network."""
