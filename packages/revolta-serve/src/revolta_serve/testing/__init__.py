"""Helpers for tests of the server and of programs that talk to it."""

from revolta_serve.testing.scripted import scripted_checkpoint

__all__ = ["scripted_checkpoint"]
