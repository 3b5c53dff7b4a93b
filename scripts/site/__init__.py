"""Makes the documentation site: `make site`."""
