"""Fuzzing of what reads bytes that others wrote: one table of parsers and of the errors they may raise."""
