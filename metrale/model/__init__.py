"""TransformerModel: what the engine talks to. `protocols` states the surface, one file a concern implements it."""
