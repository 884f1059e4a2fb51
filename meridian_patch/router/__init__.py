"""``meridian route``: one OpenAI-compatible address for think engines and answer engines."""
