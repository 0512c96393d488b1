"""Forebay: an LLM chat server for the hour when everyone writes at once."""

__version__ = "0.1.0"
