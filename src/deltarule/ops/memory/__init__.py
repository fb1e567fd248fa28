"""`ttt` and `titans`: memories that are trained while they read."""
