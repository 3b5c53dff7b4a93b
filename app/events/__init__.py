"""Users, their events and stated preferences, and the profiles made of them."""
