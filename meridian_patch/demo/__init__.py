"""The tiny reasoner: a real reasoning model small enough to ship."""
