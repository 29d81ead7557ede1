"""From engine deltas to bytes on the wire, once per engine step and without a task per stream."""
