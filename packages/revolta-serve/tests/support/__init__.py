"""Helpers shared by the tests: the outside oracle, and a hand-driven runner."""
