"""``meridian top``: what a running server does, live from its ``/metrics``."""
