"""`deltarule doctor`: are the shipped kernels right on this GPU?"""
