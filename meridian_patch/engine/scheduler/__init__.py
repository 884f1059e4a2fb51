"""The phase-aware scheduler and its parts, in the EngineCore process."""
