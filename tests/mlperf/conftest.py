from genuine import originals

__all__ = ["originals"]
