"""What survives: processes are killed, paused and cut off, and what is left is counted."""
