"""The dashboard: pages for a browser, made by the services that the API uses."""
