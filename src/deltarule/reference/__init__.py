"""The definition of the recurrence (`recurrent`) and of its chunked algorithm (`chunked`)."""
