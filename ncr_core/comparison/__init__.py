"""Comparing a new model with the served one."""
