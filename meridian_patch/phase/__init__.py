"""Which phase a request is in: boundaries, matcher, tracker."""
