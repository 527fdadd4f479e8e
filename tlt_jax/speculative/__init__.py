"""Decoding on the device; gets the network as functions."""
