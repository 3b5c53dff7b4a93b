"""Webhooks: what happened to jobs and models, told to other services by signed requests."""
