"""`selective_scan`: the recurrence whose decay differs for each element of the state."""
