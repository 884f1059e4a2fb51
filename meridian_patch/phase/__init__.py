"""Finds the phase of each request: boundaries, matcher, tracker."""
