"""The platform: settings, database, middleware and caches that all features use."""
