"""Lookahead: which pages the next step will attend to."""
