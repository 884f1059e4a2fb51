"""The marathon: a fleet under load, while parts of it are killed or hindered."""
