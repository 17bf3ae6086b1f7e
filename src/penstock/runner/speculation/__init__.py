"""Speculative decoding: proposing and verifying drafts."""
