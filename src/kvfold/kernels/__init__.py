"""Decode attention for each store, a plain-torch reference beside every fused kernel."""
