"""Experiments: one script, one question. Hydra lives here and nowhere below."""
