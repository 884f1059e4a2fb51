"""A phase tracker with an engine around it that accepts whatever is said."""

from meridian_patch.phase.tracker import PhaseTracker


class SpokenTracker(PhaseTracker):
    """Keeps the known tokens of its requests itself."""

    def add(self, request_id, known):
        super().add(request_id, list(known))

    def say(self, request_id, tokens):
        """One step of the engine, in which one request accepts these tokens.

        Returns:
            What ``observe`` says, and False when nothing was expected of the tokens.
        """
        self.runs(request_id)
        seen = self.expects([tokens], {request_id: 0}).get(request_id)
        state = self.get(request_id)
        if state is not None:
            state.known.extend(tokens)
        return seen is not None and self.observe(request_id, seen)
