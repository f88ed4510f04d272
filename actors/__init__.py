"""Ray actors: the only place that holds live state. Thin shells that move data and call the two rooms below."""
