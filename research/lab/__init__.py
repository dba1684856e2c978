"""The laboratory: rules that tune a scale, compared on populations of small models."""
