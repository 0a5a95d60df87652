"""Side by side with TRL: its loss code and its trainers. Needs the test extra, and so is not in the
wheel.
"""
