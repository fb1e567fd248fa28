"""What a server calls: the recurrence and its convolution on a pool of many requests' states.

An index at or below `null_index` names no slot of the pool: it reads zeros and writes nothing.
"""
