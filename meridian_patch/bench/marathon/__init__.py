"""The marathon: engines and their router under load, while parts of them are killed or hindered."""
