"""Explanations of the items of a list, and elicitation."""
