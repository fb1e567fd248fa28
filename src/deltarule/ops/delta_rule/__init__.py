"""`delta_rule` and `dplr`: decay none, per head or per channel; erase none, tied or free."""
