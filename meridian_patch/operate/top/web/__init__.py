"""``meridian top --web``: the same in a browser, with the last minutes as charts."""
