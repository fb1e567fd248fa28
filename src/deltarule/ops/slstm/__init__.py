"""The recurrence of sLSTM, whose gates see the last output."""
