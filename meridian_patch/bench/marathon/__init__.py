"""The marathon: engines and routers under load, while parts of them are killed or hindered."""
