"""The service as several processes: the real thing on one machine, and what runs it elsewhere."""
