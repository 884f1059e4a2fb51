"""What the tiny reasoner is trained on."""
