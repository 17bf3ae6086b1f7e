"""Drafts: who proposes them, and how they are verified."""
