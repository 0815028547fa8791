"""From held-out errors to intervals: what a prediction's ± is made of, and how wide an interval must be to hold."""
