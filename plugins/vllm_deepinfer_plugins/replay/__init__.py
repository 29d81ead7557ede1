"""SWA Bounded Replay around the model: when to replay a prefix hit, with what, and what it saved."""
