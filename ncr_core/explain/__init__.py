"""Why an item is in a list, and which questions to ask a user."""
