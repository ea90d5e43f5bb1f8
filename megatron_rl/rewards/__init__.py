"""Rewards: what a response is worth."""
