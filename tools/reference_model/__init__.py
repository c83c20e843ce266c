"""Makes the reference model: tasks, tokenizer, training, export, evaluation. ``python -m reference_model``."""
