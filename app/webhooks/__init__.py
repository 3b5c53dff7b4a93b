"""Webhooks: signed requests that tell other services about changes of jobs and models."""
