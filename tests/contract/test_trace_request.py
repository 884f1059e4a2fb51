"""What one request passes on its way does not grow."""

from trace_request import traces


def test_events_pass_no_more_than_they_did(demo_model):
    """Files where a request is freed, and returns of a step that decodes."""
    found = traces(demo_model)
    assert found["freed"].files <= 24
    assert len(found["decode"].returns) <= 160
    assert found.keys() == {"added", "prefill", "decode", "thought ends", "freed"}
