"""Parts of the measurements and fault rounds on disaggregated serving: processes, and load on them."""
