"""A checkpoint -> the same checkpoint in fewer bits, which other engines load."""
