"""``meridian calibrate``: chooses exit thresholds on labelled problems and says what they cost."""
