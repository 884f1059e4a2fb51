"""``meridian doctor``: checks environment, configuration, model and a running server."""
